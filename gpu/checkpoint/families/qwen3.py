"""Qwen 3, with norms on queries and keys."""

from gpu.checkpoint.architecture import Architecture

# The size of a head is what transformers assumes where config.json does not say it.
QWEN3 = Architecture(name="Qwen3ForCausalLM", gguf="qwen3", defaults={"head_dim": 128}, qk_norm=True)
