"""The models. `build_model` is the only way in; the model runner imports it, loads weights and calls `forward`.

In reading order:

registry  which class builds which architecture
decoder   the decoder-only transformer of Llama, Mistral, Qwen2 and Qwen3
loading   fills a model from checkpoint tensors, and proves that nothing was left out
"""

from gpu.models.decoder import CausalLM
from gpu.models.loading import WeightsMismatch
from gpu.models.registry import build_model

__all__ = ["CausalLM", "WeightsMismatch", "build_model"]
