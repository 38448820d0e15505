"""Qwen 2 and 2.5, with biases on queries, keys and values."""

from gpu.checkpoint.architecture import Architecture

QWEN2 = Architecture(name="Qwen2ForCausalLM", gguf="qwen2", attention_bias=True)
