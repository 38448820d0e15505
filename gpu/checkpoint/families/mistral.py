"""Mistral, with a sliding window. Its GGUF files call themselves llama."""

from gpu.checkpoint.architecture import Architecture

MISTRAL = Architecture(name="MistralForCausalLM", defaults={"use_sliding_window": True})
