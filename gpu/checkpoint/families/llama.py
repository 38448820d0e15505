"""Llama, and the many that took over its shape: SmolLM2, TinyLlama, DeepSeek's distillates."""

from functools import partial

from gpu.checkpoint.architecture import Architecture, llama_layer

LLAMA = Architecture(name="LlamaForCausalLM", gguf="llama", layer=partial(llama_layer, gguf_heads=True))
