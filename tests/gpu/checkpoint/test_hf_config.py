"""A config.json that lacks a key, has null there, or says a thing twice: transformers' numbers, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu.checkpoint import ModelConfig, ModelError
from gpu.checkpoint.config import FIELDS
from gpu.checkpoint.families.table import FAMILIES
from gpu.checkpoint.hf_config import config_from_hf
from tests.gpu.oracles import Runner, assert_logits, build, expected, prompt, weights_of

SLIDING = "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Sizes are so that every default of a number of heads can be computed with. All that may be left out differs from what
# transformers takes then, in any family.
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rms_norm_eps": 0.01,
    "rope_theta": 500.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 11, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
QWEN = {**WINDOWS, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0, "tie_word_embeddings": False}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 11},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "gemma2": {**GEMMA, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2},
    "mixtral": {**EXPERTS, "num_local_experts": 4, "sliding_window": 11},
    "qwen3_moe": {
        **EXPERTS, "num_experts": 4, "sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1,
        "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [0],
    },
    "gpt_oss": {**WINDOWS, **EXPERTS, "num_local_experts": 4, "swiglu_alpha": 1.2, "swiglu_limit": 1.5},
}  # fmt: skip
OWN["gemma3_text"] |= {"layer_types": [SLIDING, "full_attention", SLIDING]}
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
REQUIRED |= {"max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size"}
USUAL = {"rms_norm_eps": 1e-6, "decoder_sparse_step": 1, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
BY_MODEL_TYPE = {family.model_type: name for name, family in FAMILIES.items() if "Conditional" not in name}


def values_of(model_type: str) -> dict[str, Any]:
    named = {"model_type": model_type, "architectures": [BY_MODEL_TYPE[model_type]]}
    return copy.deepcopy(SHAPE | OWN[model_type] | named)


def windows(theirs: PreTrainedConfig) -> list[int | None]:
    """Return the windows of the layers of transformers' model, by its configuration."""
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    if theirs.model_type in ("llama", "mistral", "mixtral", "qwen3_moe"):  # which read no `layer_types`
        kinds = ["sliding_attention"] * theirs.num_hidden_layers
    window = None if theirs.model_type == "llama" else theirs.sliding_window
    return [window if kind == "sliding_attention" else None for kind in kinds]


def is_refused(values: dict[str, Any], *names: str) -> bool:
    """Return True if the configuration is refused, by one of the names, and else compare with transformers."""
    try:
        ours = config_from_hf(values, source="m")
    except ModelError as refused:
        if any(name in str(refused) for name in names):
            return True
        raise
    assert_computes_as_transformers(values, ours)
    return False


def assert_computes_as_transformers(values: dict[str, Any], ours: ModelConfig) -> None:
    theirs = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
    assert [ours.window(layer) for layer in range(ours.num_hidden_layers)] == windows(theirs)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    model = build(ours)
    model.load_weights(weights_of(oracle, ours))
    tokens = prompt(0)
    (logits,) = Runner(model, num_blocks=200).step((tokens, 0, list(range(64))))
    assert_logits(logits, expected(oracle, tokens))


def named(key: str) -> list[str]:
    """Return the names that an error about `key` may contain; layers may be left without a window."""
    return ["num_experts" if key == "num_local_experts" else key, f"leaves the layers of {SLIDING}"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OWN)
def test_a_key_that_is_missing_or_null_means_what_it_means_to_transformers(model_type: str) -> None:
    values = values_of(model_type)
    assert not is_refused(values)
    keys = values.keys() - {"architectures", "model_type", "initializer_range"}
    missing = {key: {name: value for name, value in values.items() if name != key} for key in keys}
    refused = {key for key, changed in missing.items() if is_refused(changed, *named(key))}
    assert refused <= REQUIRED | {"num_local_experts", "use_sliding_window"}
    for key in keys:
        is_refused(values | {key: None}, *named(key))


@pytest.mark.parametrize("model_type", OWN)
def test_every_default_of_a_family_is_that_of_transformers(model_type: str) -> None:
    theirs: Any = CONFIG_MAPPING[model_type]()
    family = FAMILIES[BY_MODEL_TYPE[model_type]]
    for key, default in family.defaults.items():
        if key == "rope_theta":
            default_theta = theirs.default_theta
            assert default == (default_theta["global"] if isinstance(default_theta, dict) else default_theta)
        elif key == "sliding_window":
            assert default == type(theirs).sliding_window
        elif key == "rope_parameters":
            assert default.items() <= theirs.rope_parameters.items()
        else:
            assert default == getattr(theirs, key), key
    heads = {"num_key_value_heads": theirs.num_attention_heads}
    usual = USUAL | heads | {"head_dim": theirs.hidden_size // theirs.num_attention_heads}
    numbers = [*FIELDS.items(), *family.numbers.items()]
    for key in dict(numbers).keys() - family.defaults.keys():
        default = getattr(theirs, key, None)
        assert default is None or key in REQUIRED or default == usual[key], key


ROPES: dict[str, dict[str, Any]] = {
    "scaling beside parameters of the usual base": {
        "rope_parameters": {"rope_type": "default", "rope_theta": ...},
        "rope_scaling": YARN,
    },
    "scaling and a base beside parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "rope_scaling": YARN | {"rope_theta": 700.0},
    },
    "scaling beside parameters and a base": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "rope_theta": 700.0,
        "rope_scaling": YARN,
    },
    "the same scaling twice": {
        "rope_parameters": YARN | {"rope_theta": 700.0},
        "rope_theta": 700.0,
        "rope_scaling": YARN,
    },
    "scaling alone": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "nothing of it": {"rope_scaling": {}, "rope_parameters": None},
    "no scaling": {"rope_scaling": None, "rope_parameters": {}},
}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("case", ROPES)
def test_rope_scaling_is_read_as_transformers_reads_it(model_type: str, case: str) -> None:
    values = values_of(model_type)
    values.pop("rope_theta")
    values |= copy.deepcopy(ROPES[case])
    new = values.get("rope_parameters")
    by_kind = model_type == "gemma3_text" and bool(new)
    if new and new.get("rope_theta") is ...:
        new["rope_theta"] = FAMILIES[BY_MODEL_TYPE[model_type]].defaults.get("rope_theta", 10000.0)
    if by_kind:
        values["rope_parameters"] = {"full_attention": new, "sliding_attention": {"rope_theta": 100.0}}
    assert not is_refused(values)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"rope_parameters": {"rope_theta": 700.0}}, ["rope_theta=500.0", "rope_parameters.rope_theta=700.0"]),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 700.0}, "rope_scaling": YARN},
            ["rope_theta=700.0", "takes 10000", "Move the keys of rope_scaling to rope_parameters"],
        ),
        (
            {"rope_parameters": YARN | {"factor": 2.0}, "rope_scaling": YARN},
            ["rope_parameters.factor=2.0", "rope_scaling.factor=4.0"],
        ),
        ({"rope_parameters": YARN | {"beta_fast": 9.0}, "rope_scaling": YARN}, ["beta_fast=9.0", "beta_fast=None"]),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            ["rope_parameters.rope_type='linear'", "rope_scaling.rope_type='yarn'"],
        ),
        ({"rope_scaling": YARN | {"type": "linear"}}, ["rope_scaling.rope_type='yarn'", "rope_scaling.type='linear'"]),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            ["original_max_position_embeddings=64", "=32"],
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0}, ["=1.0", "=0.5"]),
        (
            {"rope_parameters": {"full_attention": {}}},
            ["rope_parameters by type of layer (full_attention)", "LlamaForCausalLM"],
        ),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, ["dtype='bfloat16'", "torch_dtype='float32'"]),
        ({"num_experts": 8, "num_local_experts": 4}, ["num_experts=8", "num_local_experts=4"]),
        ({"model_type": "mistral"}, ["architectures=LlamaForCausalLM", "model_type='mistral'"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types", "full_attention in all layers"]),
    ],
)
def test_two_spellings_that_contradict_each_other_are_refused(values: dict[str, Any], names: list[str]) -> None:
    changed = {key: value for key, value in (values_of("llama") | values).items() if value is not ...}
    with pytest.raises(ModelError) as refused:
        config_from_hf(changed, source="m")
    assert all(name in str(refused.value) for name in ["m: ", *names])


@pytest.mark.parametrize(
    ("model_type", "values", "names"),
    [
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 7.0}},
            ["full_attention and sliding_attention", "'rope_theta'"],
        ),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["type='linear'", "Name it rope_type"]),
        ("gemma2", {"sliding_window_pattern": 3}, ["sliding_window_pattern=3", "must be 2"]),
        ("gpt_oss", {"sliding_window": None}, ["sliding_window=null", SLIDING]),
        ("qwen2", {"sliding_window": None}, ["sliding_window=null", SLIDING]),
        ("qwen3", {"use_sliding_window": False}, ["use_sliding_window=false", SLIDING]),
        ("mistral", {"layer_types": [SLIDING, "full_attention", SLIDING]}, ["layer_types", f"{SLIDING} in all layers"]),
    ],
)
def test_what_transformers_ignores_or_refuses_is_refused_by_name(
    model_type: str, values: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ModelError) as refused:
        config_from_hf(values_of(model_type) | values, source="m")
    assert all(name in str(refused.value) for name in names)
