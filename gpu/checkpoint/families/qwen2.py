"""Qwen 2 and 2.5, with biases on queries, keys and values."""

from gpu.checkpoint.architecture import Architecture

WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    gguf="qwen2",
    defaults={"num_key_value_heads": 32, **WINDOW_DEFAULTS},
    attention_bias=True,
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=WINDOW_KEYS,
)
