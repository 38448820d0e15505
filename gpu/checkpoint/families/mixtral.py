"""Mixtral: Mistral with experts in every layer. Its GGUF files call themselves llama."""

from dataclasses import replace

from gpu.checkpoint.architecture import Architecture, LayerSpec, llama_layer
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.experts import mixture_of_experts
from gpu.checkpoint.header_fields import EXPERTS, EXPERTS_PER_TOKEN


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    experts = mixture_of_experts(
        config,
        index,
        router="block_sparse_moe.gate",
        networks=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
        inner=config.intermediate_size,
        normalized=True,
    )
    return replace(llama_layer(config, index, gguf_heads=True), feed_forward=experts)


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    nullable=frozenset({"sliding_window", "head_dim"}),
    window_keys=frozenset({"sliding_window"}),
    numbers={"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN},
    layer=_layer,
)
