"""Which class builds which architecture. Imported by gpu.models; its names are those of gpu.checkpoint.config."""

from __future__ import annotations

import torch

from gpu.attention import AttentionBackend
from gpu.checkpoint import ModelConfig, ModelError
from gpu.models.decoder import CausalLM

# One decoder serves all: they differ in what the configuration says (biases, QK norms, windows), not in their shape.
MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": CausalLM,
    "MistralForCausalLM": CausalLM,
    "Qwen2ForCausalLM": CausalLM,
    "Qwen3ForCausalLM": CausalLM,
}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    attention: AttentionBackend,
) -> CausalLM:
    """A model with uninitialized weights; call its `load_weights` next.

    `max_model_len` is the longest context that will be served, in tokens. On the meta device nothing is allocated.
    Raises ModelError for an architecture or a rope scaling that is not implemented.
    """
    if config.architecture not in MODELS:
        supported = ", ".join(MODELS)
        raise ModelError(f"Architecture {config.architecture!r} is not supported; supported are {supported}.")
    model = MODELS[config.architecture]
    return model(config, dtype=dtype, device=device, max_model_len=max_model_len, attention=attention)
