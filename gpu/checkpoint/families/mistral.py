"""Mistral, with a sliding window. Its GGUF files call themselves llama."""

from gpu.checkpoint.architecture import Architecture

MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    nullable=frozenset({"sliding_window", "head_dim"}),
    window_keys=frozenset({"sliding_window"}),
)
