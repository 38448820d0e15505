"""Small configurations of transformers for Gemma 3n and 4, in every variant that matters."""

from typing import Any

import torch
from transformers import Gemma3nTextConfig, Gemma4TextConfig, PreTrainedConfig, PreTrainedModel

from tests.gpu.dense_models import FULL, SHAPE, SLIDING

SIZES: dict[str, Any] = SHAPE | {
    "initializer_range": 0.1,
    "num_hidden_layers": 6,
    "sliding_window": 11,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 24,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
}
WIDE: dict[str, Any] = {"global_head_dim": 32}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 4,
    "moe_intermediate_size": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.6, "factor": 2.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
SPARSE: dict[str, Any] = {
    "laurel_rank": 16,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.8] * 2 + [0.0] * 4,
}
GEMMA: dict[str, PreTrainedConfig] = {
    "gemma4": Gemma4TextConfig(
        **SIZES, **WIDE, num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=3.0
    ),
    "gemma4-own-keys": Gemma4TextConfig(**SIZES, **WIDE, rope_parameters=ROPES),
    "gemma4-moe": Gemma4TextConfig(**SIZES | WIDE | EXPERTS),
    "gemma3n": Gemma3nTextConfig(**SIZES | SPARSE, num_kv_shared_layers=2, altup_active_idx=1),
    "gemma3n-own-keys": Gemma3nTextConfig(
        **SIZES | {"vocab_size_per_layer_input": 90}, laurel_rank=16, num_kv_shared_layers=0, altup_correct_scale=False
    ),
}
GEMMA_NAMES = {"gemma4_text": "Gemma4ForCausalLM", "gemma3n_text": "Gemma3nForCausalLM"}
_ONES = ("bias", "layer_scalar", "router.scale", "expert_scale", "output_scale")


def vary(oracle: PreTrainedModel) -> PreTrainedModel:
    """Change weights that begin as ones or zeros, which would hide that they are not applied."""
    with torch.no_grad():
        for name, parameter in oracle.state_dict().items():
            if "norm" in name or name.endswith(_ONES):
                parameter.normal_(1.0, 0.3)
                if "q_norm" in name and oracle.config.model_type in GEMMA_NAMES:  # which scales scores by nothing else
                    parameter.mul_(0.25)
            elif "coefs" in name:
                parameter.normal_(0.0, 0.3)
    return oracle
