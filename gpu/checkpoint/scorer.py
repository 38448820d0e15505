"""The labels of a classifier or a reranker, and how its logits become scores.

A decoder is a reranker if its files name the tokens of a low and a high score: as the module LogitScore of
sentence-transformers, or as `classifier_from_token` in config.json (vLLM's conversion). The published Qwen3-Reranker
has only its name. Other models have a sequence classification head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.hf_files import MAX_JSON, parse_object, read_json, read_text

Activation = Literal["sigmoid", "softmax", "identity"]

MAX_LABELS = 1024
_CLASSIFIER = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_QWEN3_RERANKER = re.compile(r"qwen3[-_. ]?reranker", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The way to compute scores: by a decoder's logits of `tokens` (texts or ids, one for each label), or by a
    classification head, without `tokens`. Such decoders read the prompt of Qwen3-Reranker, with `instruction` if given.
    """

    labels: tuple[str, ...]
    activation: Activation
    tokens: tuple[str | int, ...] = ()
    instruction: str | None = None

    def token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of `tokens`. Raises `ModelError` for a token that the vocabulary lacks."""
        ids = [tokenizer.token_to_id(each) if isinstance(each, str) else each for each in self.tokens]
        size = tokenizer.get_vocab_size()
        for token, token_id in zip(self.tokens, ids, strict=True):
            if token_id is None or not 0 <= token_id < size:
                raise ModelError(f"The token {shown(token)} of a score is not in the model's vocabulary.")
        return tuple(each for each in ids if each is not None)


QWEN3_RERANKER = Scorer(labels=("no", "yes"), activation="softmax", tokens=("no", "yes"))


def named_reranker(name: str, model_type: object) -> Scorer | None:
    """Return the scorer of a published Qwen3-Reranker, which is recognized by its name; None for other models."""
    if model_type != "qwen3" or not _QWEN3_RERANKER.search(name):
        return None
    return QWEN3_RERANKER


def scorer_of_labels(labels: tuple[str, ...]) -> Scorer:
    """Return the scorer of a classification head with the usual activation."""
    return Scorer(labels=labels, activation="sigmoid" if len(labels) == 1 else "softmax")


def scorer_of_directory(directory: Path, values: Mapping[str, Any], name: str) -> Scorer | None:
    """Return the scorer of a model with this config.json (`values`); None for a model that gives no scores.

    Raises `ModelError` for labels, tokens or an activation that are not supported.
    """
    named = values.get("architectures")
    is_classifier = isinstance(named, list) and any(str(each).endswith(_CLASSIFIER) for each in named)
    trained = read_json(directory / "config_sentence_transformers.json")
    tokens = _tokens(directory, values, name)
    if not tokens:
        if not is_classifier:
            return named_reranker(name, values.get("model_type"))
        labels = _labels(values, name)
        return Scorer(labels=labels, activation=_activation(values, trained, name, len(labels)))
    prompts, default = trained.get("prompts"), trained.get("default_prompt_name")
    instruction = prompts.get(default) if isinstance(prompts, dict) and isinstance(default, str) else None
    activation = _activation(values, trained, name, len(tokens))
    return Scorer(
        labels=tuple(map(str, values.get("classifier_from_token") or ("no", "yes"))),
        activation="identity" if activation == "identity" else "softmax",
        tokens=tokens,
        instruction=instruction if isinstance(instruction, str) else None,
    )


def as_decoder(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for a classifier that is a decoder with its head of tokens."""
    named = values.get("architectures")
    named = [str(each).replace(_CLASSIFIER, "ForCausalLM") for each in named] if isinstance(named, list) else named
    return {**values, "architectures": named}


def _tokens(directory: Path, values: Mapping[str, Any], name: str) -> tuple[str | int, ...]:
    """Return the tokens of the labels, the one of the higher score last; none for another kind of model."""
    found, key = values.get("classifier_from_token"), "classifier_from_token in config.json"
    if found is None and (directory / "modules.json").is_file():
        modules = parse_object(f'{{"modules": {read_text(directory / "modules.json", MAX_JSON)}}}', name)["modules"]
        for module in modules if isinstance(modules, list) else ():
            if isinstance(module, dict) and str(module.get("type")).endswith(".LogitScore"):
                settings = read_json(directory / Path(str(module.get("path"))).name / "config.json")
                found = [settings.get("false_token_id"), settings.get("true_token_id")]
                key = "false_token_id and true_token_id of LogitScore"
    if found is None:
        return ()
    if not isinstance(found, list) or len(found) != 2 or not {type(each) for each in found} <= {int, str}:
        raise ModelError(
            f"{name}: {key} must name two tokens, that of a low and that of a high score, got {found!r:.80}."
        )
    if values.get("model_type") != "qwen3":
        raise ModelError(
            f"{name}: a reranker of the type {shown(values.get('model_type'))} that scores by tokens is not supported; "
            "allowed: qwen3, with the prompt of Qwen3-Reranker."
        )
    return tuple(found)


def _labels(values: Mapping[str, Any], source: str) -> tuple[str, ...]:
    named = values.get("id2label") or {str(number): f"LABEL_{number}" for number in range(2)}
    if (
        not isinstance(named, dict)
        or len(named) > MAX_LABELS
        or set(named) != {str(each) for each in range(len(named))}
    ):
        raise ModelError(f"{source}: id2label in config.json must name 1 to {MAX_LABELS} labels, numbered from 0.")
    return tuple(str(named[str(number)]) for number in range(len(named)))


def _activation(values: Mapping[str, Any], trained: Mapping[str, Any], source: str, num_labels: int) -> Activation:
    in_config = values.get("sentence_transformers")
    found = (in_config if isinstance(in_config, dict) else {}).get("activation_fn") or trained.get("activation_fn")
    found = found or values.get("sbert_ce_default_activation_function")
    if found is None:
        return "sigmoid" if num_labels == 1 or values.get("problem_type") == "multi_label_classification" else "softmax"
    kind = _ACTIVATIONS.get(str(found).rpartition(".")[2])
    if kind is None:
        raise ModelError(
            f"{source}: the activation {shown(found)} is not supported; allowed: {', '.join(_ACTIVATIONS)}."
        )
    return kind
