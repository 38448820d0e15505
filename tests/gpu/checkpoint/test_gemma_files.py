"""What Gemma's files say, and what they leave to be known: configurations as published, and tensors by their names."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import RopeScalingType
from safetensors.torch import save_file

from gpu.checkpoint import ModelConfig, ModelError, RopeScaling, open_model
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from gpu.weights.tensors import weights_of
from tests.engine.helpers import byte_level_tokenizer
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights

FULL, LOCAL = "full_attention", "sliding_attention"
GEMMA2: dict[str, Any] = {  # google/gemma-2-27b
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {  # google/gemma-3-4b-it, which sees images too
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
TINY_GEMMA = replace(
    TINY, architecture="Gemma3ForCausalLM", num_hidden_layers=7, num_key_value_heads=1, sliding_window=16, qk_norm=True,
    tie_word_embeddings=True, rope_scaling=RopeScaling(rope_type="linear", factor=8.0),
    layer_types=(*[LOCAL] * 5, FULL, LOCAL),
    numbers={"query_pre_attn_scalar": 0.0, "final_logit_softcapping": 0.0, "rope_local_base_freq": 10000.0},
)  # fmt: skip


def spec(values: dict[str, Any], **more: Any) -> DecoderSpec:
    return spec_of(config_from_hf(values | more, source="gemma"))


def test_gemma_2_as_published():
    published = spec(GEMMA2)
    assert [layer.attention.heads.window for layer in published.layers[:4]] == [4096, None, 4096, None]
    heads = published.layers[0].attention.heads
    assert (heads.scale, heads.softcap, published.softcap) == (144**-0.5, 50.0, 30.0)
    assert len({layer.attention.rope for layer in published.layers}) == 1
    assert published.head is None
    assert published.embedding_scale == 4608**0.5


def test_the_text_of_gemma_3_as_published():
    published = spec(GEMMA3)
    windows = [layer.attention.heads.window for layer in published.layers]
    assert windows == ([1024] * 5 + [None]) * 5 + [1024] * 4
    local, full = published.layers[4].attention, published.layers[5].attention
    assert (local.rope.theta, local.rope.scaling) == (10000.0, None)
    assert (full.rope.theta, full.rope.scaling) == (1e6, RopeScaling(rope_type="linear", factor=8.0))
    assert (full.heads.query, full.heads.kv, full.heads.dim, full.heads.scale) == (8, 4, 256, 1 / 16)
    assert published.softcap is None


def test_what_transformers_writes_today_says_the_same():
    ropes = {FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, LOCAL: {"rope_theta": 10000.0}}
    text = {key: value for key, value in GEMMA3["text_config"].items() if key != "rope_scaling"}
    kinds = ([LOCAL] * 5 + [FULL]) * 5 + [LOCAL] * 4
    assert spec(GEMMA3, text_config=text | {"rope_parameters": ropes, "layer_types": kinds}) == spec(GEMMA3)
    other = spec(GEMMA3, text_config=text | {"rope_parameters": ropes | {LOCAL: {"rope_theta": 7.0}}})
    assert other.layers[0].attention.rope.theta == 7.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*must be 'gelu_pytorch_tanh'"),
        (GEMMA2 | {"final_logit_softcapping": -1}, "final_logit_softcapping in config.json must be a number from 0"),
        (GEMMA2 | {"layer_types": [LOCAL]}, "layer_types in config.json must name"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3 | {"text_config": []}, "text_config in config.json must be an object"),
        (
            GEMMA3 | {"text_config": GEMMA3["text_config"] | {"sliding_window_pattern": 0}},
            "sliding_window_pattern in config.json must be an integer from 1",
        ),
        (
            GEMMA3 | {"rope_parameters": {FULL: {}, LOCAL: {"rope_type": "linear", "factor": 2.0}}},
            "RoPE scaling of layers with a window is not supported",
        ),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(values, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(values, source="gemma")


def gguf(path, config: ModelConfig) -> TinyGGUF:
    made = TinyGGUF(path, config)
    made.writer.add_sliding_window(16)
    made.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    made.writer.add_rope_scaling_factor(8.0)
    return made


def test_a_gguf_file_holds_the_sums_and_neither_pattern_nor_local_base(tmp_path):
    weights = random_weights(TINY_GEMMA)
    model = open_model(str(gguf(tmp_path / "m.gguf", TINY_GEMMA).add_weights(weights).save()))
    assert model.config == replace(TINY_GEMMA, torch_dtype="bfloat16")
    read = dict(weights_of(model))
    assert read.keys() == weights.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(tensor.numpy(), weights[name], err_msg=name)


def test_a_gguf_file_may_name_pattern_and_local_base(tmp_path):
    made = gguf(tmp_path / "m.gguf", TINY_GEMMA)
    made.writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    made.writer.add_float32("gemma3.rope.freq_base_swa", 500.0)
    layers = spec_of(open_model(str(made.add_weights(random_weights(TINY_GEMMA)).save())).config).layers
    assert [layer.attention.heads.window for layer in layers[:4]] == [16, None, 16, None]
    assert layers[0].attention.rope.theta == 500.0


@pytest.mark.parametrize("layers", [2, 46])
def test_the_scale_of_a_gguf_file_is_known_by_the_size_of_the_model(tmp_path, layers):
    config = replace(
        TINY_GEMMA,
        architecture="Gemma2ForCausalLM",
        num_hidden_layers=layers,
        head_dim=32,
        qk_norm=False,
        layer_types=(),
    )
    files = open_model(str(gguf(tmp_path / "m.gguf", config).add_weights(random_weights(config)).save()))
    heads = spec_of(files.config).layers[0].attention.heads
    assert heads.scale == (64**-0.5 if layers == 46 else 32**-0.5)
    assert (heads.softcap, spec_of(files.config).softcap) == (50.0, 30.0)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_norms_of_a_directory_lack_one_and_images_are_left_out(tmp_path, prefix):
    text = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 270,
        "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16,
    }  # fmt: skip
    values = GEMMA3 | {"text_config": text}
    config = config_from_hf(values, source="gemma")
    stored = {name: torch.randn(shape).bfloat16() for name, shape in tensor_shapes(config).items()}
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in stored.items()}
    if prefix != "model.":
        named[f"{prefix.split('language_model.')[0]}vision_tower.layer.weight"] = torch.zeros(3)
        named["multi_modal_projector.weight"] = torch.zeros(3)
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values))
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    read = dict(weights_of(open_model(str(tmp_path))))
    assert read.keys() == stored.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor.float(), stored[name].float() + ("norm" in name), atol=0, rtol=0)
