"""Small configurations of transformers for models with states, and values by which `tests.gpu.mutated_configs` changes
them."""

from typing import Any

from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.gpu.dense_models import FULL, MULTIPLIERS, SHAPE

LINEAR, SLIDING = "linear_attention", "sliding_attention"
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
HYBRIDS: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(**SHAPE, **DELTA, **EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": Qwen3_5TextConfig(**SHAPE, **DELTA),
    "lfm2": Lfm2Config(**SHAPE, block_multiple_of=16, layer_types=["conv", FULL, "conv", "conv"]),
    "lfm2-moe": Lfm2MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=1,
        layer_types=["conv", FULL, "conv", "conv"],
    ),
    "granite4-hybrid": GraniteMoeHybridConfig(
        **SHAPE | MULTIPLIERS,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        mamba_n_heads=8,
        mamba_d_state=12,
        mamba_n_groups=2,
        layer_types=["mamba", "attention", "mamba", "mamba"],
    ),
}
VALUES: dict[str, list[Any]] = {
    "layer_types": [
        None,
        [],
        [FULL] * 4,
        [LINEAR] * 4,
        ["mamba"] * 4,
        ["conv"] * 4,
        [LINEAR, FULL, LINEAR, LINEAR],
        ["mamba", "attention", "mamba", "mamba"],
        ["conv", FULL, "conv", "conv"],
        ["conv", SLIDING, "conv", "conv"],
        [LINEAR, FULL, LINEAR],
    ],
    "layers_block_type": [["mamba", "attention", "mamba", "mamba"], [FULL] * 4],
    "full_attention_interval": [1, 2, 3, 4, None],
    "full_attn_idxs": [None, [], [1], [0, 3], 1],
    "attn_output_gate": [True, False, None],
    "linear_num_key_heads": [1, 2, 3, 4, None],
    "linear_num_value_heads": [2, 3, 4, 8],
    "linear_key_head_dim": [4, 8],
    "linear_value_head_dim": [8, 12],
    "linear_conv_kernel_dim": [1, 2, 4, 5, None],
    "conv_L_cache": [1, 2, 3, 4, None],
    "conv_bias": [True, False, None],
    "norm_eps": [1e-5, 1e-3, None],
    "tie_embedding": [True, False, None],
    "block_ff_dim": [96, 120, None],
    "block_multiple_of": [1, 16, 32, 7, 0, None],
    "block_ffn_dim_multiplier": [1.0, 1, 1.5, None, -1.0],
    "block_auto_adjust_ff_dim": [True, False, None],
    "num_dense_layers": [0, 1, 2, 9, None],
    "use_expert_bias": [True, False, None],
    "routed_scaling_factor": [1.0, 2.5, None],
    "mamba_n_heads": [4, 8, 16, 7, None],
    "mamba_n_groups": [1, 2, 4, 3, None],
    "mamba_d_head": ["auto", 16, 8, None],
    "mamba_d_state": [12, 24, None],
    "mamba_d_conv": [1, 3, 4, None],
    "mamba_expand": [1, 2, 3, None],
    "mamba_chunk_size": [8, 256],
    "mamba_conv_bias": [True, False, None],
    "mamba_proj_bias": [True, False, None],
    "time_step_limit": [None, [0.0, float("inf")], [0.0, 0.1], [0.001, float("inf")]],
}
