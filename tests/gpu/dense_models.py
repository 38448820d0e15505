"""Small configurations of transformers for the dense relatives of Llama, in every variant that matters."""

from typing import Any

from transformers import (
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Ministral3Config,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    SmolLM3Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and mistakes show
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # so that queries of Ministral 3 grow within a test's prompt
}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.6}
GROWING = YARN | MSCALES | {"llama_4_scaling_beta": 0.3}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.5,
}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = [SLIDING, SLIDING, FULL, SLIDING]


def longrope(original: int, pairs: int) -> dict[str, Any]:
    """Rotation for contexts of up to 512 tokens. The tests' prompts are long if `original` is short."""
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": original,
    }


def phi(original: int, pairs: int, **more: Any) -> Phi3Config:
    rope = longrope(original, pairs) | {"partial_rotary_factor": pairs / 8}
    return Phi3Config(**SHAPE, rope_parameters=rope, original_max_position_embeddings=original, **more)


def granite_4(**more: Any) -> GraniteMoeHybridConfig:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}  # of which no layer makes use
    return GraniteMoeHybridConfig(
        **SHAPE | MULTIPLIERS | mamba,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=[FULL] * 4,
        **more,
    )


DENSE: dict[str, PreTrainedConfig] = {
    "ministral3": Ministral3Config(**SHAPE, rope_parameters=GROWING),
    "phi3": Phi3Config(**SHAPE, sliding_window=11),
    "phi3-short": phi(256, 8),
    "phi4-mini-long": phi(16, 6, tie_word_embeddings=True),
    "granite": GraniteConfig(**SHAPE | MULTIPLIERS),
    "granite-tied": GraniteConfig(**SHAPE | MULTIPLIERS, tie_word_embeddings=True, rope_parameters=YARN | MSCALES),
    "granite4": granite_4(position_embedding_type="rope"),
    "granite4-nope": granite_4(tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**SHAPE),
    "smollm3-window": SmolLM3Config(
        **SHAPE, no_rope_layers=[1, 0, 0, 1], use_sliding_window=True, sliding_window=11, tie_word_embeddings=False
    ),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo3": Olmo3Config(**SHAPE, sliding_window=11, layer_types=WINDOWS),
    "olmo3-yarn": Olmo3Config(
        **SHAPE,
        sliding_window=11,
        rope_parameters={FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "glm4": Glm4Config(**SHAPE),
    "glm4-full": Glm4Config(**SHAPE, attention_bias=False, rope_parameters=YARN | {"partial_rotary_factor": 1.0}),
    "glm": GlmConfig(**SHAPE),
    "qwen2-moe": Qwen2MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "qwen2-moe-normalized": Qwen2MoeConfig(
        **SHAPE | {"initializer_range": 0.1},
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=96,
        norm_topk_prob=True,
        qkv_bias=False,
    ),
}
DENSE_NAMES = {  # architectures by model_type
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm": "GlmForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
