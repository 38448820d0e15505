"""The recipe of a model's authors for embeddings from its hidden states: pooling, dense layers and prompts.

They are read from the files of sentence-transformers (modules.json, the folders of its modules and
config_sentence_transformers.json) or from `pooling_type` of a GGUF file. Files that would give other vectors than the
authors' are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gpu.checkpoint.architecture import Part
from gpu.checkpoint.config import FIELDS, FLAG, ModelConfig, ModelError, check_field, shown
from gpu.checkpoint.encoder import DenseSpec
from gpu.checkpoint.hf_files import MAX_JSON, parse_object, read_json, read_text

PoolingKind = Literal["mean", "last", "cls", "weighted_mean"]

_MODES: dict[str, PoolingKind] = {"mean": "mean", "lasttoken": "last"}  # sentence-transformers' names
_ENCODER_MODES = _MODES | {"cls": "cls", "weightedmean": "weighted_mean"}
_FLAGS: dict[str, str] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_FLAGS |= {"pooling_mode_cls_token": "cls", "pooling_mode_weightedmean_tokens": "weightedmean"}
_GGUF_POOLING: dict[object, PoolingKind | None] = {None: None, 0: None, 1: "mean", 3: "last"}
_ENCODER_GGUF_POOLING = _GGUF_POOLING | {2: "cls", 4: None}  # 4: a classification head
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_ACTIVATIONS |= {"Sigmoid": "sigmoid"}
_UNDERSTOOD = ("Transformer", "Pooling", "Normalize", "LogitScore")  # the last one: `scorer`
_MAX_MODULES = 16


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """The pooling and the prompts in a model's files; empty for a model that only generates text."""

    pooling: PoolingKind | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # the prompt's name for requests that name none
    pools_prompt: bool = True  # the prompt's tokens count in the mean
    # The layers after pooling, or of every token (ColBERT), of an encoder. Their files are in folders of these names.
    dense: Mapping[str, DenseSpec] = field(default_factory=dict)
    token_dense: Mapping[str, DenseSpec] = field(default_factory=dict)
    max_length: int | None = None  # tokens of a prompt

    def completed(self, config: ModelConfig) -> ModelConfig:
        """Return an encoder's configuration with these layers, and with this length of prompts."""
        heads = {"dense": tuple(self.dense.values()), "token_dense": tuple(self.token_dense.values())}
        longest = min(config.max_position_embeddings, self.max_length or config.max_position_embeddings)
        return replace(config, encoder=replace(config.encoder, **heads), max_position_embeddings=longest)


def embedder_of_directory(directory: Path, source: str, *, is_encoder: bool = False) -> Embedder:
    """Read modules.json and the files that it names. Raises `ModelError` for a module, a pooling or a prompt that is
    not supported."""
    if not (directory / "modules.json").is_file():
        return Embedder()
    modules = parse_object(f'{{"modules": {read_text(directory / "modules.json", MAX_JSON)}}}', source)["modules"]
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules[:_MAX_MODULES]):
        raise ModelError(f"{source}: modules.json must hold a list of objects, got {shown(modules)}.")
    pooling: PoolingKind | None = None
    settings: dict[str, Any] = {}
    dense: dict[str, DenseSpec] = {}
    understood = (*_UNDERSTOOD, "Dense") if is_encoder else _UNDERSTOOD
    for module in modules[:_MAX_MODULES]:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in understood or len(modules) > _MAX_MODULES:
            raise ModelError(
                f"{source}: the module {shown(module.get('type'))} of modules.json is not supported; allowed: "
                f"{', '.join(understood)}. Without modules.json the model is served, but its vectors lack that module."
            )
        if kind == "Pooling":
            settings = _settings_of(directory, module.get("path"), source)
            pooling = _pooling(settings, source, _ENCODER_MODES if is_encoder else _MODES)
        if kind == "Dense":
            folder = str(module.get("path"))
            dense[folder] = _dense(folder, _settings_of(directory, folder, source), source)
    found = _with_prompts(directory, pooling, settings, source, is_encoder)
    longest = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    found = replace(found, dense=dense) if pooling else replace(found, token_dense=dense)
    if not is_encoder or longest is None:
        return found
    field = FIELDS["max_position_embeddings"]
    longest = check_field(field, longest, key="max_seq_length in sentence_bert_config.json", source=source)
    return replace(found, max_length=longest)


def _dense(folder: str, settings: Mapping[str, Any], source: str) -> DenseSpec:
    key = f"of {folder}/config.json"
    outputs, inputs = (
        check_field(FIELDS["hidden_size"], settings.get(name), key=f"{name} {key}", source=source)
        for name in ("out_features", "in_features")
    )
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        named = shown(settings.get("activation_function"))
        raise ModelError(
            f"{source}: activation_function={named} {key} is not supported; allowed: {', '.join(_ACTIVATIONS)}."
        )
    has_bias = check_field(FLAG, settings.get("bias", True), key=f"bias {key}", source=source)
    part = Part(f"{folder}.linear", f"dense_{folder[:1]}", (outputs, inputs), bias=has_bias)
    return DenseSpec(weight=part, activation=_ACTIVATIONS[activation])


def embedder_of_gguf(value: object, key: str, source: str, *, is_encoder: bool = False) -> Embedder:
    """Read a GGUF file's `pooling_type`. Raises `ModelError` for one that is not supported."""
    kinds = _ENCODER_GGUF_POOLING if is_encoder else _GGUF_POOLING
    if isinstance(value, bool) or not isinstance(value, int | None) or value not in kinds:
        allowed = "0 (none), 1 (mean), 2 (cls), 3 (last), 4 (rank)" if is_encoder else "0 (none), 1 (mean), 3 (last)"
        raise ModelError(f"{source}: {key}={shown(value)} is not supported; allowed: {allowed}.")
    return Embedder(pooling=kinds[value])


def _settings_of(directory: Path, path: object, source: str) -> dict[str, Any]:
    if not isinstance(path, str) or Path(path).name != path:
        raise ModelError(f"{source}: path of a module in modules.json must be a folder's name, got {shown(path)}.")
    if not (directory / path / "config.json").is_file():
        raise ModelError(f"{source} lacks {path}/config.json, which modules.json names. Fetch the model's files anew.")
    return read_json(directory / path / "config.json")


def _pooling(settings: Mapping[str, Any], source: str, allowed: Mapping[str, PoolingKind]) -> PoolingKind:
    flags = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    named = settings.get("pooling_mode")
    modes = [named] if named is not None else [_FLAGS.get(name, name) for name in flags]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in allowed:
        raise ModelError(
            f"{source}: pooling by {', '.join(map(shown, modes)) or 'nothing'} in the configuration of its Pooling "
            f"module is not supported; allowed: one of {' and '.join(allowed)}."
        )
    return allowed[modes[0]]


def _with_prompts(
    directory: Path, pooling: PoolingKind | None, settings: Mapping[str, Any], source: str, is_encoder: bool
) -> Embedder:
    found = read_json(directory / "config_sentence_transformers.json")
    prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{source}: prompts in config_sentence_transformers.json must be an object of strings.")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{source}: default_prompt_name={shown(default)} in config_sentence_transformers.json is not one "
            f"of its prompts."
        )
    pools_prompt = settings.get("include_prompt", True) is True
    if not pools_prompt and any(prompts.values()) and not (is_encoder and pooling in ("mean", "cls")):
        raise ModelError(f"{source}: include_prompt=false of its Pooling module is not supported.")
    return Embedder(pooling=pooling, prompts=prompts, default_prompt=default, pools_prompt=pools_prompt)
