"""Small configurations of transformers for the models with latent attention, and for GLM-4.5 with their experts."""

from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, Glm4MoeLiteConfig, PreTrainedConfig

from tests.gpu.dense_models import SHAPE, YARN

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
PLAIN: dict[str, Any] = {key: value for key, value in SHAPE.items() if key != "head_dim"} | EXPERTS
LATENT: dict[str, Any] = PLAIN | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
BOTH = {"mscale": 0.8, "mscale_all_dim": 0.6}

DEEPSEEK: dict[str, PreTrainedConfig] = {
    "deepseek-v3": DeepseekV3Config(**LATENT, **GROUPS, first_k_dense_replace=1, rope_parameters=YARN | BOTH),
    "deepseek-v3-direct": DeepseekV3Config(
        **LATENT | {"q_lora_rank": None, "initializer_range": 0.1},
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
    "deepseek-v2": DeepseekV2Config(
        **LATENT, **GROUPS, topk_method="group_limited_greedy", first_k_dense_replace=1, rope_parameters=YARN | BOTH
    ),
    "deepseek-v2-lite": DeepseekV2Config(**LATENT | {"q_lora_rank": None}, first_k_dense_replace=1),
    "glm-flash": Glm4MoeLiteConfig(**LATENT, mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
    "glm-moe": Glm4MoeConfig(**PLAIN | {"head_dim": 16}, use_qk_norm=True, attention_bias=True),
    "glm-moe-plain": Glm4MoeConfig(**PLAIN, **GROUPS, first_k_dense_replace=2, norm_topk_prob=False),
}
DEEPSEEK_NAMES = {  # architectures by model_type
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}

# For a `ModelConfig` with latent attention, by its own names.
OWN_NAMES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "numbers": {
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "rope_interleave": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.3,
        "norm_topk_prob": True,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
}
