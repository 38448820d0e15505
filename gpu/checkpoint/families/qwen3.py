"""Qwen 3, with norms on queries and keys."""

from gpu.checkpoint.architecture import Architecture
from gpu.checkpoint.families.qwen2 import WINDOW_DEFAULTS, WINDOW_KEYS

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf="qwen3",
    defaults={"head_dim": 128, "num_key_value_heads": 32, **WINDOW_DEFAULTS},
    qk_norm=True,
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=WINDOW_KEYS,
)
