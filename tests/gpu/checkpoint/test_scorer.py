"""Which models score, by what labels and tokens, as their files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu.checkpoint.config import ModelError
from gpu.checkpoint.scorer import Scorer, as_decoder, scorer_of_directory

CAUSAL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
PUBLISHED = Scorer(labels=("no", "yes"), activation="softmax", tokens=("no", "yes"))


def scorer(directory: Path, values: dict[str, Any], name: str = "m", **trained: Any) -> Scorer | None:
    (directory / "config_sentence_transformers.json").write_text(json.dumps(trained))
    return scorer_of_directory(directory, values, name)


def test_a_published_reranker_is_known_by_its_name(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-Reranker-0.6B", "qwen3_reranker-4b"):
        assert scorer(tmp_path, CAUSAL, name) == PUBLISHED
    assert scorer(tmp_path, CAUSAL, "Qwen3-0.6B") is None
    assert scorer(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "qwen3-reranker") is None


def test_the_conversion_of_vllm_is_a_decoder_with_two_tokens(tmp_path: Path) -> None:
    values = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "model_type": "qwen3",
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    assert scorer(tmp_path, values) == PUBLISHED
    assert as_decoder(values)["architectures"] == ["Qwen3ForCausalLM"]


def test_the_module_of_sentence_transformers_names_the_tokens(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    tokens = tmp_path / "1_LogitScore" / "config.json"
    tokens.write_text(json.dumps({"true_token_id": 7, "false_token_id": 3}))
    made = scorer(
        tmp_path,
        CAUSAL,
        activation_fn="torch.nn.modules.linear.Identity",
        prompts={"web": "Find the page"},
        default_prompt_name="web",
    )
    assert made == Scorer(labels=("no", "yes"), activation="identity", tokens=(3, 7), instruction="Find the page")
    tokens.write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    with pytest.raises(ModelError, match="two tokens"):
        scorer(tmp_path, CAUSAL)


def test_a_head_has_the_labels_and_the_activation_of_its_configuration(tmp_path: Path) -> None:
    one = CLASSIFIER | {"id2label": {"0": "LABEL_0"}}
    assert scorer(tmp_path, one) == Scorer(labels=("LABEL_0",), activation="sigmoid")
    assert scorer(tmp_path, CLASSIFIER) == Scorer(labels=("LABEL_0", "LABEL_1"), activation="softmax")
    three = CLASSIFIER | {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    assert scorer(tmp_path, three) == Scorer(labels=("bad", "fair", "good"), activation="softmax")
    many = three | {"problem_type": "multi_label_classification"}
    assert scorer(tmp_path, many) == Scorer(labels=("bad", "fair", "good"), activation="sigmoid")
    identity = "torch.nn.modules.linear.Identity"
    for values, trained in (
        (one | {"sentence_transformers": {"activation_fn": identity}}, {}),
        (one | {"sbert_ce_default_activation_function": identity}, {}),
        (one, {"activation_fn": identity}),
    ):
        assert scorer(tmp_path, values, **trained) == Scorer(labels=("LABEL_0",), activation="identity")


@pytest.mark.parametrize(
    "values",
    [
        CAUSAL | {"classifier_from_token": ["yes"]},
        CAUSAL | {"classifier_from_token": "yes"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "classifier_from_token": ["no", "yes"]},
        CLASSIFIER | {"id2label": {"1": "a"}},
        CLASSIFIER | {"id2label": ["a"]},
        CLASSIFIER | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
    ],
)
def test_what_cannot_be_scored_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="m: "):
        scorer(tmp_path, values)
