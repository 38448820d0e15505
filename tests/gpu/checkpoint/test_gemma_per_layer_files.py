"""Files of Gemma 3n and 4: what is read, skipped, and refused by name."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from transformers import Gemma4TextConfig, PreTrainedConfig

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig, ModelError, open_model
from gpu.checkpoint.architecture import GeGLUSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.gemma_layers import SparseGeGLUSpec
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import check_shapes, tensor_shapes
from gpu.kv_cache import kv_cache_size, kv_layout
from gpu.sharding import Layout, check_cuts
from tests.gpu.checkpoint.test_dense_files import assert_gives, made
from tests.gpu.checkpoint.test_hybrid_files import assert_packed_as_plain
from tests.gpu.dense_gguf import write_gguf
from tests.gpu.gemma_models import GEMMA, SIZES, WIDE
from tests.selection import slow_except

FULL, SLIDING = "full_attention", "sliding_attention"
TEXT: dict[str, Any] = {  # google/gemma-4-E2B-it
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
}
E2B = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": TEXT}
MOE = TEXT | {  # google/gemma-4-26B-A4B-it
    "num_hidden_layers": 30,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
}


def read(text: dict[str, Any] = TEXT, **changes: Any) -> ModelConfig:
    return config_from_hf({**E2B, "text_config": text | changes}, source="gemma")


def test_layers_that_share_keys_have_the_place_of_the_layer_that_has_them():
    config = read()
    layout = kv_layout(config)
    places = [*zip(layout.groups, layout.slots, layout.parts, strict=True)]
    assert len(set(places[:15])) == 15
    assert {*places[15:]} == {places[13], places[14]}
    assert [places[index] == places[14] for index in (19, 24, 29, 34)] == 4 * [True]
    spec = spec_of(config)
    assert [len(layer.attention.qkv) for layer in spec.layers] == [3] * 15 + [1] * 20
    network = spec.layers[20].feed_forward
    assert isinstance(network, GeGLUSpec)
    assert network.gate.shape[0] == 2 * 6144


@pytest.mark.parametrize(
    ("text", "windows", "wide"), [(TEXT, (None, 512, 512), 3 * 512), (MOE, (None, *[512] * 9), 3 * 2048)]
)
def test_layers_with_narrow_keys_share_slots(text: dict[str, Any], windows: tuple[int | None, ...], wide: int):
    """Two layers of 256 fit where one of 512 does: a block is as small as with layers of one size."""
    layout = kv_layout(config := read(text))
    assert layout.windows == windows
    size = kv_cache_size(
        config, element_size=2, block_size=16, max_num_seqs=1, max_model_len=64, budget=2**30, kv_cache_memory=None
    )
    assert size.bytes_per_block == 2 * wide * 2 * 16


def test_the_heads_of_a_full_layer_are_read_from_both_forms_of_the_file():
    heads: dict[str, Any] = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    saved = Gemma4TextConfig(**SIZES, **heads, attention_k_eq_v=True).to_dict()
    config = config_from_hf({**saved, "architectures": ["Gemma4ForCausalLM"]}, source="gemma")
    assert "global_head_dim" not in saved
    assert [config.kv_heads(index) for index in (1, 2)] == [(2, 16), (1, 32)]
    assert read(MOE).kv_heads(5) == (2, 512)
    assert read(MOE, attention_k_eq_v=False).kv_heads(5) == (8, 512), "transformers looks only where values are keys"


def test_the_first_layers_of_gemma_3n_keep_the_largest_activations():
    values = GEMMA["gemma3n"].to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    kinds = [type(layer.feed_forward) for layer in spec_of(config_from_hf(values, source="gemma")).layers]
    assert kinds == [SparseGeGLUSpec] * 2 + [GeGLUSpec] * 4


def test_vision_audio_and_keys_that_no_layer_reads_are_skipped(caplog: pytest.LogCaptureFixture):
    config = read()
    shapes = {name.replace("model.", "model.language_model."): shape for name, shape in tensor_shapes(config).items()}
    more = ["vision_tower.a.weight", "embed_vision.b.weight", "audio_tower.c.weight", "embed_audio.d.weight"]
    more += ["language_model.layers.15.self_attn.k_proj.weight", "language_model.layers.34.self_attn.k_norm.weight"]
    with caplog.at_level(logging.INFO):
        check_shapes([*shapes.items(), *((f"model.{name}", (1,)) for name in more)], config, source="gemma")
    assert caplog.messages == [
        "gemma: 2 tensors of the vision model and 2 tensors of the audio model and 2 tensors of layers that read the "
        "keys of others are skipped"
    ]
    with pytest.raises(ModelError, match="layers.14.self_attn.k_proj.weight is"):
        check_shapes([("model.layers.14.self_attn.k_proj.weight", (1,))], config, source="gemma")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 36}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 0}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": [SLIDING] * 35}, "layer_types"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1.0}}}, "rope_parameters"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"global_head_dim": 33}, "global_head_dim"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        read(**changes)


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_are_refused_by_name(setting: str):
    with pytest.raises(ConfigError, match=f"{setting}.*Gemma 3n and 4 run on one rank"):
        check_cuts(
            spec_of(read()),
            Layout(tensor_parallel_size=1 + (setting[0] == "t"), pipeline_parallel_size=1 + (setting[0] == "p")),
            gathers=False,
        )


def changed(name: str, **changes: Any) -> PreTrainedConfig:
    return type(GEMMA[name])(**GEMMA[name].to_dict() | changes)


IN_GGUF = GEMMA | {"gemma4-own-keys": Gemma4TextConfig(**SIZES, **WIDE)}
IN_GGUF["gemma3n-own-keys"] = changed("gemma3n-own-keys", altup_correct_scale=True)
oracle_of = cache(lambda name: made(IN_GGUF[name]))


@pytest.mark.parametrize("name", slow_except(IN_GGUF, "gemma4", "gemma3n"))
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path, name: str):
    oracle = oracle_of(name)
    assert_gives(open_model(str(write_gguf(tmp_path / "m.gguf", oracle))), oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_GGUF)
def test_quantized_gguf_files_have_the_weights_of_plain_ones(tmp_path, name: str):
    assert_packed_as_plain(tmp_path, oracle_of(name))


@pytest.mark.parametrize(
    ("name", "metadata", "named"),
    [
        ("gemma4", {"attention.key_length_swa": None}, "key_length_swa"),
        ("gemma4", {"attention.value_length": 16}, "value_length"),
        ("gemma4", {"attention.shared_kv_layers": None}, "shared_kv_layers"),
        ("gemma4", {"attention.shared_kv_layers": 7}, "feed_forward_length"),
        ("gemma4", {"attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
        ("gemma4", {"attention.sliding_window_pattern": [True] * 6}, "layer_types"),
        ("gemma4", {"feed_forward_length": [48] * 6}, "feed_forward_length"),
        ("gemma4", {"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ("gemma4", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("gemma3n", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("gemma4", {"embedding_length_per_layer_input": 0}, "num_kv_shared_layers"),
        ("gemma4-moe", {"attention.head_count_kv": [2, 2, 1, 2, 1, 1]}, "head_count_kv"),
        ("gemma4-moe", {"expert_used_count": None}, "expert_used_count"),
        ("gemma4-moe", {"expert_count": 5}, "ffn_gate_up_exps"),
        ("gemma3n", {"attention.shared_kv_layers": 7}, "num_kv_shared_layers"),
        ("gemma3n", {"altup.num_inputs": 4}, "altup_projections"),
        ("gemma3n", {"altup.active_idx": 3}, "altup_active_idx"),
        ("gemma3n", {"activation_sparsity_scale": [float("nan")] * 6}, "activation_sparsity_pattern"),
        ("gemma3n", {"activation_sparsity_scale": [1.0]}, "activation_sparsity_pattern"),
    ],
)
def test_wrong_or_missing_metadata_of_a_gguf_file_is_refused_by_name(tmp_path, name, metadata, named):
    with pytest.raises(ModelError, match=named):
        open_model(str(write_gguf(tmp_path / "m.gguf", oracle_of(name), **metadata)))
