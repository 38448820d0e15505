"""gpt-oss: experts of a clamped SwiGLU, sinks, biases everywhere, and windows in every second layer.

Its checkpoints have the experts of a layer as one tensor, gate and up by turns, in bfloat16 or MXFP4.
"""

from dataclasses import replace

from gpu.checkpoint.architecture import LLAMA_VALUES, Architecture, LayerSpec, Part, RMSNormSpec, Stack, llama_layer
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.experts import mixture_of_experts
from gpu.checkpoint.header_fields import EXPERTS, EXPERTS_PER_TOKEN, HeaderField


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = llama_layer(config, index)
    attention, norm = layer.attention, layer.feed_forward_norm.weight
    in_hf, in_gguf = f"model.layers.{index}.self_attn.sinks", f"blk.{index}.attn_sinks"
    sinks = Part(in_hf, in_gguf, (attention.heads.query,), suffix="")
    experts = mixture_of_experts(
        config,
        index,
        router="mlp.router",
        networks=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        inner=config.intermediate_size,
        normalized=True,
        bias=True,
        stacks=(
            Stack("mlp.experts.gate_up_proj", 0, 2),
            Stack("mlp.experts.gate_up_proj", 1, 2),
            Stack("mlp.experts.down_proj"),
        ),
        clamp=(config.numbers["swiglu_alpha"], config.numbers["swiglu_limit"]),
    )
    return replace(
        layer,
        attention=replace(attention, sinks=sinks, out=replace(attention.out, bias=config.attention_bias)),
        feed_forward_norm=RMSNormSpec(replace(norm, gguf=f"blk.{index}.post_attention_norm"), config.rms_norm_eps),
        feed_forward=experts,
    )


GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    gguf="gpt-oss",
    model_type="gpt_oss",
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    allowed_values={**LLAMA_VALUES, "attention_bias": (True, None), "sliding_window_pattern": (2, None)},
    attention_bias=True,
    numbers={
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "swiglu_alpha": HeaderField(float, 1e-3, 1e3, "", default=1.702),
        "swiglu_limit": HeaderField(float, 1e-3, 1e6, "", default=7.0),
    },
    quantizations=frozenset({"mxfp4"}),
    yarn_truncate=False,
    full_layers=2,
    window_keys=frozenset({"sliding_window", "layer_types"}),
    layer=_layer,
)
