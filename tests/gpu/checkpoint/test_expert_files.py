"""What the files of models with experts say: configurations as published, experts alone and in stacks, MXFP4."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu.checkpoint import ModelConfig, ModelError, RopeScaling, open_model
from gpu.checkpoint.architecture import ClampedSwiGLUSpec, DecoderSpec, MoESpec, SwiGLUSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from gpu.rotary import inverse_frequencies
from gpu.weights.reading import read_weights
from gpu.weights.tensors import weights_of
from tests.engine.helpers import byte_level_tokenizer
from tests.gpu.checkpoint_files import TINY, TinyGGUF, permute, random_weights

MIXTRAL: dict[str, Any] = {  # mistralai/Mixtral-8x7B-Instruct-v0.1
    "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None,
    "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {  # openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "quantization_config": {"modules_to_not_convert": ["model.embed_tokens"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088,
}  # fmt: skip
PUBLISHED = {"mixtral": MIXTRAL, "qwen3-moe": QWEN3_MOE, "gpt-oss": GPT_OSS}
OWN = {"num_experts": 3, "num_experts_per_tok": 2}
TINY_MIXTRAL = replace(TINY, architecture="MixtralForCausalLM", numbers=OWN)
TINY_QWEN = replace(
    TINY,
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    numbers=OWN | {"moe_intermediate_size": 96, "norm_topk_prob": True},
)
TINY_OSS = replace(
    TINY,
    architecture="GptOssForCausalLM",
    attention_bias=True,
    sliding_window=16,
    layer_types=("sliding_attention", "full_attention"),
    rope_scaling=RopeScaling(
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=64,
        truncate=False,
        attention_factor=0.1 * np.log(32.0) + 1.0,
    ),
    numbers=OWN | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
)


def spec(values: dict[str, Any], **more: Any) -> DecoderSpec:
    return spec_of(config_from_hf(values | more, source="experts"))


def experts_of(found: DecoderSpec, layer: int = 0) -> MoESpec:
    network = found.layers[layer].feed_forward
    assert isinstance(network, MoESpec)
    return network


def test_mixtral_as_published():
    experts = experts_of(spec(MIXTRAL), 31)
    assert (len(experts.experts), experts.top_k, experts.normalized) == (8, 2, True)
    assert experts.router.shape == (8, 4096)
    names = [part.weight_name for part in vars(experts.experts[7]).values()]
    assert names == [f"model.layers.31.block_sparse_moe.experts.7.{name}.weight" for name in ("w1", "w3", "w2")]
    assert experts.experts[0].down.shape == (4096, 14336)


def test_qwen3_moe_as_published_and_with_dense_layers():
    experts = experts_of(spec(QWEN3_MOE), 47)
    assert (len(experts.experts), experts.top_k, experts.normalized) == (128, 8, True)
    assert experts.experts[127].gate.shape == (768, 2048)
    assert not experts_of(spec(QWEN3_MOE, norm_topk_prob=False)).normalized
    kinds = [type(layer.feed_forward) for layer in spec(QWEN3_MOE, mlp_only_layers=[5], decoder_sparse_step=2).layers]
    assert kinds[:8] == [SwiGLUSpec, MoESpec, SwiGLUSpec, MoESpec, SwiGLUSpec, SwiGLUSpec, SwiGLUSpec, MoESpec]
    dense = spec(QWEN3_MOE, mlp_only_layers=[0]).layers[0].feed_forward
    assert isinstance(dense, SwiGLUSpec)
    assert dense.gate.shape == (6144, 2048)


def test_gpt_oss_as_published():
    published = spec(GPT_OSS)
    experts, attention = experts_of(published), published.layers[0].attention
    assert (len(experts.experts), experts.top_k, experts.normalized, experts.router.bias) == (32, 4, True, True)
    network = experts.experts[0]
    assert isinstance(network, ClampedSwiGLUSpec)
    assert (network.alpha, network.limit, network.down.bias) == (1.702, 7.0, True)
    assert [layer.attention.heads.window for layer in published.layers[:4]] == [128, None, 128, None]
    assert attention.sinks is not None
    assert attention.out.bias
    scaling = attention.rope.scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.truncate) == ("yarn", False)
    assert scaling.attention_factor == pytest.approx(1.3465735902799727)  # as transformers has it


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_gives_the_frequencies_of_transformers(truncate):
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = GPT_OSS["rope_scaling"] | {"rope_theta": 150000, "truncate": truncate}
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(rope_parameters=rope), "cpu")
    scaling = config_from_hf(GPT_OSS | {"rope_scaling": rope}, source="experts").rope_scaling
    assert scaling is not None
    found = torch.from_numpy(inverse_frequencies(64, 150000.0, scaling))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert scaling.attention_factor == factor


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must not be above the number of experts, 8"),
        (
            MIXTRAL | {"num_local_experts": 1024, "num_hidden_layers": 1024},
            "1,024 experts in 1,024 layers are more than",
        ),
        (MIXTRAL | {"num_local_experts": 0}, "num_experts in config.json must be an integer from 1 to 1,024"),
        (MIXTRAL | {"num_local_experts": None}, "num_experts in config.json must be an integer from 1 .* got None"),
        (QWEN3_MOE | {"moe_intermediate_size": -1}, "moe_intermediate_size in config.json must be an integer from 1"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob in config.json must be true or false, got 1"),
        (QWEN3_MOE | {"mlp_only_layers": "all"}, "mlp_only_layers in config.json must be a list of layers, got 'all'"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step in config.json must be an integer from 1"),
        (QWEN3_MOE | {"quantization_config": {"quant_method": "mxfp4"}}, "quantized checkpoint .*mxfp4"),
        (GPT_OSS | {"attention_bias": False}, "attention_bias=False"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit in config.json must be a number from 0.001"),
        (
            GPT_OSS | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "RoPE scaling 'dynamic' is not supported",
        ),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(values, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(values, source="experts")


def gguf_of(path: Path, config: ModelConfig, weights: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """As llama.cpp's converter writes it: a tensor for each matrix of all experts of a layer, of type `kind`."""
    model = TinyGGUF(path, config)
    writer = model.writer
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(int(config.numbers["num_experts_per_tok"]))
    if "moe_intermediate_size" in config.numbers:
        writer.add_expert_feed_forward_length(int(config.numbers["moe_intermediate_size"]))
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
    names = gguf.get_tensor_name_map(model.architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stacks: dict[str, list[np.ndarray]] = defaultdict(list)
    for hf_name, values in weights.items():
        part = hf_name.split(".")[-2]
        turned = permute(values, heads[part]) if model.name == "llama" and part in heads else values
        stacks[re.sub(r"experts\.\d+\.", "experts.", hf_name)].append(turned)
    for hf_name, matrices in stacks.items():
        target = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if hf_name.endswith("sinks"):  # the only one without a suffix
            target += ".weight"
        if "experts" in hf_name and hf_name.endswith(".weight"):
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(target, gguf.quants.quantize(np.stack(matrices), quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(target, np.stack(matrices) if "experts" in hf_name else matrices[0])
    return model.save()


@pytest.mark.parametrize("config", [TINY_MIXTRAL, TINY_QWEN, TINY_OSS], ids=lambda config: config.architecture)
def test_a_gguf_file_has_the_experts_of_a_layer_as_one_tensor(tmp_path, config):
    weights = random_weights(config)
    model = open_model(str(gguf_of(tmp_path / "m.gguf", config, weights)))
    assert model.config == replace(config, torch_dtype="bfloat16")
    read = dict(weights_of(model))
    assert read.keys() == weights.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(tensor.numpy(), weights[name], err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_quantized_experts_keep_their_bits(tmp_path, kind):
    weights = random_weights(TINY_OSS)
    model = open_model(str(gguf_of(tmp_path / "m.gguf", TINY_OSS, weights, kind)))
    type_ = gguf.GGMLQuantizationType[kind]
    read = dict(weights_of(model))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    np.testing.assert_array_equal(
        read[name].numpy(), gguf.quants.dequantize(gguf.quants.quantize(weights[name], type_), type_)
    )


def test_a_gguf_file_with_other_experts_than_it_claims_is_refused(tmp_path):
    claimed = replace(TINY_QWEN, numbers={**TINY_QWEN.numbers, "num_experts": 2})
    path = gguf_of(tmp_path / "m.gguf", claimed, random_weights(TINY_QWEN))
    with pytest.raises(ModelError, match=r"unknown: 'blk.0.ffn_gate_exps.weight'.*misshapen: model.layers.0.mlp.gate"):
        open_model(str(path))


def directory(path: Path, values: dict[str, Any], *files: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


SMALL_OSS = GPT_OSS | {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 270,
    "num_key_value_heads": 1, "head_dim": 16, "layer_types": ["sliding_attention"], "num_local_experts": 4,
    "eos_token_id": 2,
}  # fmt: skip
STACK = "model.layers.0.mlp.experts"


def small_oss() -> dict[str, torch.Tensor]:
    """All tensors but the experts' as gpt-oss has them."""
    shapes = tensor_shapes(config_from_hf(SMALL_OSS, source="experts"))
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items() if ".experts." not in name}
    tensors[f"{STACK}.gate_up_proj_bias"] = torch.randn(4, 64).bfloat16()
    return tensors | {f"{STACK}.down_proj_bias": torch.randn(4, 64).bfloat16()}


def mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, outputs, inputs] at random: blocks and scales"""
    *rows, inputs = shape
    blocks = torch.randint(0, 256, (*rows, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 140, (*rows, inputs // 32), dtype=torch.uint8)


@pytest.mark.parametrize("exact", [True, False], ids=["as Q8_0", "scales beyond float16"])
def test_mxfp4_is_read_as_transformers_reads_it(tmp_path, exact):
    tensors, (blocks, scales), (others, more) = small_oss(), mxfp4(4, 64, 64), mxfp4(4, 64, 32)
    if not exact:
        scales[3, 5, 1] = 200
    first = tensors | {f"{STACK}.gate_up_proj_blocks": blocks, f"{STACK}.down_proj_blocks": others}
    second = {f"{STACK}.gate_up_proj_scales": scales, f"{STACK}.down_proj_scales": more}
    files = open_model(str(directory(tmp_path / "oss", SMALL_OSS, first, second)))
    read = dict(read_weights(files))
    name = f"{STACK}.3.up_proj.weight"
    assert getattr(read[name], "type", "float32") == ("float32" if not exact else "Q8_0")

    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inputs, outputs]
    down = convert_moe_packed_tensors(others, more, dtype=torch.float32)
    ours = dict(weights_of(files))
    for expert in range(4):
        assert ours[f"{STACK}.{expert}.gate_proj.weight"].equal(theirs[expert].T[0::2])
        assert ours[f"{STACK}.{expert}.up_proj.weight"].equal(theirs[expert].T[1::2])
        assert ours[f"{STACK}.{expert}.down_proj.weight"].equal(down[expert].T)
        assert ours[f"{STACK}.{expert}.up_proj.bias"].equal(tensors[f"{STACK}.gate_up_proj_bias"][expert, 1::2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, r"unknown: 'model.layers.0.mlp.experts.down_proj_blocks'"),
        ({"down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, "unknown: .*down_proj_blocks"),
        ({"down_proj_bias": torch.zeros(5, 64)}, r"missing: .*0.down_proj.bias.*unknown: .*down_proj_bias"),
        ({"gate_up_proj_blocks": torch.zeros(4, 66, 2, 16, dtype=torch.uint8)}, "misshapen|unknown"),
        ({"gate_up_proj_blocks": torch.zeros(4, 64, 2, 16)}, "unknown: .*gate_up_proj_blocks"),
        ({"gate_up_proj_scales": torch.full((4, 64, 2), torch.nan)}, "unknown: .*gate_up_proj_blocks"),
        (
            {
                "down_proj_blocks": torch.zeros(4, 16, dtype=torch.uint8),
                "down_proj_scales": torch.zeros(4, dtype=torch.uint8),
            },
            "unknown: .*down_proj_blocks",
        ),
    ],
)
def test_stacks_that_are_not_those_of_the_configuration_are_refused(tmp_path, change, message):
    tensors, (blocks, scales), (others, more) = small_oss(), mxfp4(4, 64, 64), mxfp4(4, 64, 32)
    tensors |= {f"{STACK}.gate_up_proj_blocks": blocks, f"{STACK}.gate_up_proj_scales": scales}
    tensors |= {f"{STACK}.down_proj_blocks": others, f"{STACK}.down_proj_scales": more}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[f"{STACK}.{name}"]
        else:
            tensors[f"{STACK}.{name}"] = tensor
    path = directory(tmp_path / "oss", SMALL_OSS, tensors)
    with pytest.raises(ModelError, match=message):
        open_model(str(path))
