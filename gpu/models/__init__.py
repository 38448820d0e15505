"""The models. `build_model` is the only way in; the model runner imports it, loads weights and calls `forward`."""

from gpu.models.decoder import CausalLM
from gpu.models.loading import WeightsMismatch
from gpu.models.registry import build_model

__all__ = ["CausalLM", "WeightsMismatch", "build_model"]
