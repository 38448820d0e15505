"""Llama, and the many that took over its shape: SmolLM2, TinyLlama, DeepSeek's distillates."""

from functools import partial

from gpu.checkpoint.architecture import Architecture, llama_layer

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    gguf="llama",
    nullable=frozenset({"head_dim", "num_key_value_heads"}),
    layer=partial(llama_layer, gguf_heads=True),
)
