"""Qwen 3 with experts, in all layers but those that a config.json names."""

from dataclasses import replace

from gpu.checkpoint.architecture import Architecture, LayerSpec, llama_layer
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.experts import mixture_of_experts
from gpu.checkpoint.header_fields import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = llama_layer(config, index)
    if index in config.dense_layers:
        return layer
    experts = mixture_of_experts(
        config,
        index,
        router="mlp.gate",
        networks=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        inner=int(config.numbers["moe_intermediate_size"]),
        normalized=bool(config.numbers["norm_topk_prob"]),
    )
    return replace(layer, feed_forward=experts)


QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    model_type="qwen3_moe",
    defaults={"norm_topk_prob": False, "num_key_value_heads": 4, "sliding_window": 4096},
    window_keys=frozenset({"sliding_window", "use_sliding_window"}),  # all layers have the window
    qk_norm=True,
    numbers={
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": replace(FIELDS["intermediate_size"], gguf="expert_feed_forward_length"),
        "norm_topk_prob": replace(FLAG, gguf="expert_weights_norm", default=True),
    },
    layer=_layer,
)
