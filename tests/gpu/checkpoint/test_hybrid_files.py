"""config.json of models with states: what is read, and what is refused by name."""

from __future__ import annotations

import logging
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig, ModelError, ModelFiles, QuantizedRows, open_model
from gpu.checkpoint.architecture import AttentionSpec, GatedAttentionSpec, GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import check_shapes, tensor_shapes
from gpu.kv_cache import kv_layout
from gpu.sharding import Layout, check_cuts
from gpu.weights.reading import floats, read_weights
from gpu.weights.tensors import weights_of
from tests.gpu.checkpoint.test_dense_files import assert_gives, made
from tests.gpu.dense_gguf import write_gguf
from tests.gpu.dense_models import SHAPE, longrope
from tests.gpu.hybrid_models import DELTA, HYBRIDS
from tests.gpu.hybrid_models import EXPERTS as SMALL_EXPERTS
from tests.gpu.oracles import Runner, build, expected, prompt
from tests.selection import slow_except

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def read(values: dict[str, Any], name: str = "Qwen3NextForCausalLM", **changes: Any) -> ModelConfig:
    values = {key: value for key, value in values.items() if key not in changes}
    changes = {key: value for key, value in changes.items() if value is not ...}  # left out
    return config_from_hf({**values, **changes, "architectures": [name]}, source="the model")


NEXT = Qwen3NextConfig(**SIZES, **EXPERTS).to_dict()
CONV: dict[str, Any] = {"conv_L_cache": 3, "intermediate_size": 12288, "full_attn_idxs": [1, 5]}
LFM2 = Lfm2Config(**SIZES, **CONV).to_dict() | {"layer_types": None}
GRANITE = GraniteMoeHybridConfig(**SIZES, mamba_n_heads=8, layer_types=4 * ["mamba", "attention"]).to_dict()


def test_the_defaults_are_those_of_transformers():
    config = read({key: NEXT[key] for key in (*SIZES, "model_type", "intermediate_size", "max_position_embeddings")})
    full = Qwen3NextConfig(**SIZES)
    assert {name: config.numbers[name] for name in config.numbers if name != "partial_rotary_factor"} == {
        name: getattr(full, name) for name in config.numbers if name != "partial_rotary_factor"
    }
    assert config.numbers["partial_rotary_factor"] == full.to_dict()["rope_parameters"]["partial_rotary_factor"]
    assert list(config.layer_types) == full.layer_types


def test_every_fourth_layer_has_keys_and_values_and_the_others_have_states():
    config = read(NEXT)
    kinds = [type(layer.attention) for layer in spec_of(config).layers]
    assert kinds == 2 * [GatedDeltaSpec, GatedDeltaSpec, GatedDeltaSpec, GatedAttentionSpec]
    layout = kv_layout(config)
    assert (layout.windows, layout.num_slots) == ((None,), 2)
    assert len(set(zip(layout.groups, layout.slots, strict=True))) == 8
    two = read(NEXT, layer_types=..., full_attention_interval=2)
    assert [two.has_keys(index) for index in range(8)] == 4 * [False, True]


def kinds_of(config: ModelConfig) -> list[type]:
    return [type(layer.attention) for layer in spec_of(config).layers]


def test_lfm2_has_attention_in_the_layers_of_full_attn_idxs_and_smaller_networks_than_it_says():
    config = read(LFM2, "Lfm2ForCausalLM")
    assert [index for index, kind in enumerate(kinds_of(config)) if kind is AttentionSpec] == [1, 5]
    assert set(kinds_of(config)) == {AttentionSpec, ShortConvSpec}
    assert (config.intermediate_size, config.tie_word_embeddings, config.rms_norm_eps) == (8192, True, 1e-5)
    changes = {"block_ff_dim": 500, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.5, "tie_embedding": False}
    config = read(LFM2, "Lfm2ForCausalLM", norm_eps=1e-3, **changes)
    assert (config.intermediate_size, config.tie_word_embeddings, config.rms_norm_eps) == (512, False, 1e-3)
    assert read(LFM2, "Lfm2ForCausalLM", block_auto_adjust_ff_dim=False).intermediate_size == 12288
    assert not spec_of(read(LFM2, "Lfm2ForCausalLM", full_attn_idxs=None)).state_bytes


def test_granite_4_has_mamba_where_it_says_and_a_network_for_all_tokens_besides_its_experts():
    config = read(GRANITE, "GraniteMoeHybridForCausalLM")
    assert kinds_of(config) == 4 * [Mamba2Spec, AttentionSpec]
    assert (config.intermediate_size, config.numbers["moe_intermediate_size"], config.num_experts) == (1024, 11008, 8)
    named = {"layer_types": ..., "layers_block_type": 8 * ["full_attention"]}
    assert kinds_of(read(GRANITE, "GraniteMoeHybridForCausalLM", **named)) == 8 * [AttentionSpec]


def changed(name: str, **changes: Any) -> PreTrainedConfig:
    return type(HYBRIDS[name])(**HYBRIDS[name].to_dict() | changes)


IN_GGUF = {name: HYBRIDS[name] for name in ("lfm2", "lfm2-moe", "qwen3.5")}
IN_GGUF["qwen3-next"] = changed("qwen3-next", mlp_only_layers=[])
IN_GGUF["qwen3-next-6"] = changed("qwen3-next", mlp_only_layers=[], linear_num_value_heads=6)
IN_GGUF["qwen3.5-equal"] = changed("qwen3.5", linear_num_key_heads=4)
IN_GGUF["qwen3.5-moe"] = Qwen3_5MoeTextConfig(**SHAPE, **DELTA, **SMALL_EXPERTS)
IN_GGUF["granite4-hybrid"] = changed("granite4-hybrid", mamba_n_groups=1)
IN_GGUF["granite4-hybrid-dense"] = changed("granite4-hybrid", mamba_n_groups=1, num_local_experts=0)
oracle_of = cache(lambda name: made(IN_GGUF[name]))
LIKE_OLDER_FILES: dict[str, Any] = {"split": False, "attention.recurrent_layers": None, "full_attention_interval": None}


def assert_agrees(files: ModelFiles, oracle: PreTrainedModel) -> None:
    """Compute whole, in chunks, and token by token from a state. Two forms of a delta net in transformers differ by
    8e-4, so log-probabilities may by 5e-3."""
    model, tokens, blocks = build(files.config), prompt(0), list(range(12))
    model.load_weights(weights_of(files))
    wanted = expected(oracle, tokens).log_softmax(1)
    for ends in ([len(tokens)], [17, 40, *range(41, len(tokens) + 1)]):
        runner = Runner(model)
        parts = [runner.step((tokens[:end], start, blocks))[0] for start, end in pairwise([0, *ends])]
        torch.testing.assert_close(torch.cat(parts).log_softmax(1), wanted, atol=5e-3, rtol=0)


@pytest.mark.parametrize("name", slow_except(IN_GGUF, "lfm2-moe", "qwen3-next", "qwen3.5-moe"))
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path, name: str):
    oracle = made(IN_GGUF[name])
    files = open_model(str(write_gguf(tmp_path / "m.gguf", oracle)))
    assert_agrees(files, oracle)
    if not name.startswith("qwen"):
        assert_gives(files, oracle)


@pytest.mark.parametrize("name", slow_except(["qwen3-next", "qwen3-next-6"], "qwen3-next"))
def test_older_gguf_files_of_qwen3_next_are_read(tmp_path, name: str):
    """They have one projection by key head, and every fourth layer has keys though no key says so."""
    oracle = made(IN_GGUF[name])
    assert_agrees(open_model(str(write_gguf(tmp_path / "m.gguf", oracle, **LIKE_OLDER_FILES))), oracle)


def assert_packed_as_plain(tmp_path: Path, oracle: PreTrainedModel) -> None:
    """Compare the weights of a file in Q8_0 with those of one in float32."""
    plain = dict(read_weights(open_model(str(write_gguf(tmp_path / "plain.gguf", oracle)))))
    packed = dict(read_weights(open_model(str(write_gguf(tmp_path / "packed.gguf", oracle, kind="Q8_0")))))
    assert plain.keys() == packed.keys()
    assert any(isinstance(weight, QuantizedRows) for weight in packed.values())
    for tensor, weight in packed.items():
        wanted = floats(plain[tensor])
        np.testing.assert_allclose(floats(weight), wanted, atol=float(np.abs(wanted).max()) / 200, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_GGUF)
def test_quantized_gguf_files_have_the_weights_of_plain_ones(tmp_path, name: str):
    assert_packed_as_plain(tmp_path, made(IN_GGUF[name]))


def test_layers_of_a_gguf_file_that_predict_further_tokens_are_skipped_with_one_line(tmp_path, caplog):
    oracle = made(IN_GGUF["qwen3.5"])
    recurrent = [*(kind == "linear_attention" for kind in oracle.config.layer_types), False]
    more: dict[str, Any] = {"nextn_predict_layers": 1, "block_count": 5, "attention.recurrent_layers": recurrent}
    drafts = {f"blk.4.{name}.weight": np.ones((2, 32), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    with caplog.at_level(logging.INFO, "gpu.checkpoint.tensors"):
        files = open_model(str(write_gguf(tmp_path / "m.gguf", oracle, tensors=drafts, **more)))
    assert "2 tensors of multi-token prediction are skipped" in caplog.text
    assert_agrees(files, oracle)


@pytest.mark.parametrize(
    ("name", "metadata", "named"),
    [
        ("qwen3.5", {"ssm.group_count": None}, "ssm.group_count"),
        ("qwen3.5", {"ssm.time_step_rank": None}, "ssm.time_step_rank"),
        ("qwen3.5", {"ssm.time_step_rank": 5}, "ssm.inner_size"),
        ("qwen3.5", {"ssm.state_size": None}, "ssm.state_size"),
        ("qwen3.5", {"ssm.inner_size": None}, "ssm.inner_size"),
        ("qwen3.5", {"ssm.conv_kernel": None}, "ssm.conv_kernel"),
        ("qwen3.5", {"ssm.conv_kernel": 3}, "ssm_conv1d|conv1d"),
        ("qwen3.5", {"ssm.group_count": 4}, "in_proj_qkv|attn_qkv"),
        ("qwen3.5", {"rope.dimension_count": None}, "rope.dimension_count"),
        ("qwen3.5", {"rope.dimension_count": 18}, "rope.dimension_count"),
        ("qwen3.5", {"rope.dimension_count": 3}, "partial_rotary_factor"),
        ("qwen3.5", {"nextn_predict_layers": 4}, "nextn_predict_layers"),
        ("qwen3.5", {"attention.recurrent_layers": [True] * 4}, "recurrent_layers"),
        ("qwen3.5", {"attention.recurrent_layers": [True, False]}, "recurrent_layers"),
        ("qwen3.5", {"attention.recurrent_layers": [1, 1, 1, 0]}, "recurrent_layers"),
        ("qwen3.5", {"attention.recurrent_layers": None, "full_attention_interval": 2}, "layers.1.self_attn"),
        ("qwen3-next", {"expert_used_count": None}, "expert_used_count"),
        ("qwen3-next", {"expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length"),
        ("qwen3-next", {"expert_gating_func": 2}, "expert_gating_func"),
        ("lfm2-moe", {"expert_used_count": None}, "expert_used_count"),
        ("lfm2-moe", {"expert_gating_func": 1}, "expert_gating_func"),
        ("lfm2-moe", {"leading_dense_block_count": None}, "leading_dense_block_count"),
        ("lfm2-moe", {"shortconv.l_cache": None}, "shortconv.l_cache"),
        ("lfm2-moe", {"attention.head_count_kv": [0, 2, 0]}, "head_count_kv"),
    ],
)
def test_wrong_or_missing_metadata_of_a_gguf_file_is_refused_by_name(tmp_path, name, metadata, named):
    with pytest.raises(ModelError, match=named):
        open_model(str(write_gguf(tmp_path / "m.gguf", oracle_of(name), **metadata)))


def test_value_heads_of_one_key_head_that_are_apart_have_one_rank(tmp_path):
    spec = spec_of(open_model(str(write_gguf(tmp_path / "m.gguf", made(IN_GGUF["qwen3.5"])))).config)
    with pytest.raises(ConfigError, match="GGUF files of Qwen3.5"):
        check_cuts(spec, Layout(tensor_parallel_size=2), gathers=True)


@pytest.mark.parametrize(
    ("values", "changes", "named"),
    [
        (LFM2, {"full_attn_idxs": []}, "layer_types"),
        (LFM2, {"full_attn_idxs": 3}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": 3, "layer_types": 4 * ["conv", "full_attention"]}, "full_attn_idxs"),
        (LFM2, {"layer_types": 4 * ["linear_attention", "full_attention"]}, "layer_types"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2, {"norm_eps": None}, "rms_norm_eps"),
        (LFM2, {"block_multiple_of": "x"}, "block_multiple_of"),
        (LFM2, {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier"),
        (GRANITE, {"layer_types": None}, "layer_types"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_groups"),
        (GRANITE, {"mamba_d_head": None}, "mamba_d_head"),
        (GRANITE, {"mamba_d_head": 8}, "mamba_d_head"),
        (GRANITE, {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": None}, "time_step_limit"),
        (GRANITE, {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_lfm2_and_granite_4_cannot_be_is_refused_by_name(values: dict[str, Any], changes: Any, named: str):
    with pytest.raises(ModelError, match=named):
        read(values, "Lfm2ForCausalLM" if values is LFM2 else "GraniteMoeHybridForCausalLM", **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"rope_parameters": {**NEXT["rope_parameters"], "partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
        ({"rope_parameters": {**NEXT["rope_parameters"], "partial_rotary_factor": 0.05}}, "partial_rotary_factor"),
        (
            {"rope_parameters": longrope(16, 8) | {"partial_rotary_factor": 0.25}},
            "short_factor must hold .* 2 pairs",
        ),
        ({"layer_types": 8 * ["linear_attention"]}, "layer_types"),
        ({"layer_types": 4 * ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_experts": 0}, "num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(NEXT, **changes)


def test_experts_in_some_layers_of_qwen3_5_are_refused_since_transformers_ignores_the_key():
    values = Qwen3_5MoeTextConfig(**SIZES, **EXPERTS).to_dict()
    assert read(values, "Qwen3_5MoeForCausalLM").num_experts == 4
    with pytest.raises(ModelError, match="mlp_only_layers"):
        read(values, "Qwen3_5MoeForCausalLM", mlp_only_layers=[1])


@pytest.mark.parametrize(("whole", "text", "tied"), [(True, False, True), (False, True, False), (..., True, False)])
def test_the_wrapper_of_qwen3_5_decides_whether_embeddings_are_tied(whole: Any, text: bool, tied: bool):
    values = Qwen3_5Config(text_config={**SIZES, "intermediate_size": 80}).to_dict()
    values["text_config"]["tie_word_embeddings"] = text
    assert read(values, "Qwen3_5ForConditionalGeneration", tie_word_embeddings=whole).tie_word_embeddings is tied


def test_tensors_for_images_and_drafts_are_skipped_with_one_line(caplog):
    config = read(Qwen3_5Config(text_config={**SIZES, "intermediate_size": 80}).to_dict(), "Qwen3_5ForCausalLM")
    names = {name.replace("model.", "model.language_model.", 1): shape for name, shape in tensor_shapes(config).items()}
    names |= {"model.visual.blocks.0.norm1.weight": (4,), "mtp.fc.weight": (2, 2), "mtp.norm.weight": (4,)}
    with caplog.at_level(logging.INFO, "gpu.checkpoint.tensors"):
        check_shapes(names.items(), config, source="the model")
    assert [record.getMessage() for record in caplog.records] == [
        "the model: 1 tensors of the vision model and 2 tensors of multi-token prediction are skipped"
    ]
