"""Root-mean-square normalization (Zhang and Sennrich, arXiv:1910.07467). Imported by gpu.models.

Statistics are taken in float32 whatever the dtype of the input, as Hugging Face does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from gpu.checkpoint.architecture import Heads, RMSNormSpec
from gpu.kernels import add_rms_norm
from gpu.kernels.dispatch import on_triton
from gpu.layers.weights import Place, WeightSlot


class RMSNorm(nn.Module):
    """Normalizes the residual stream, and first adds to it what the last sublayer contributed."""

    def __init__(self, spec: RMSNormSpec, place: Place) -> None:
        super().__init__()
        self.spec = spec
        self.shape, self.eps = spec.weight.shape, spec.eps
        self.weight = place.parameter(*self.shape, dtype=_dtype(spec, place))

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` to `residual` in place, if given; return the normalized residual. All [T, size]."""
        if on_triton(residual):
            return add_rms_norm(residual, delta, self.weight, self.eps)
        if delta is not None:
            residual.add_(delta)
        return F.rms_norm(residual.to(self.weight.dtype), self.shape, self.weight, self.eps).to(residual.dtype)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield self.spec.weight.weight_name, WeightSlot.into(self.weight)


class QKNorm(nn.Module):
    """RMSNorm over each query and key head (Qwen3): one weight for all query heads, one for all key heads.

    Queries and keys lie side by side in the merged projection, so one call takes both.
    """

    head_index: torch.Tensor

    def __init__(self, specs: tuple[RMSNormSpec, RMSNormSpec], heads: Heads, place: Place) -> None:
        super().__init__()
        self.specs = specs
        self.shape, self.eps = specs[0].weight.shape, specs[0].eps
        self.weight = place.parameter(2, heads.dim, dtype=_dtype(specs[0], place))  # of the queries, of the keys
        rows = [0] * heads.query + [1] * heads.kv
        self.register_buffer("head_index", torch.tensor(rows, device=place.device), persistent=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[T, num_heads + num_kv_heads, head_dim], queries first -> the same, normalized and contiguous"""
        normed = F.rms_norm(qk.to(self.weight.dtype), self.shape, None, self.eps)
        return normed.mul_(self.weight.index_select(0, self.head_index)).to(qk.dtype)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for spec, weight in zip(self.specs, self.weight, strict=True):
            yield spec.weight.weight_name, WeightSlot.into(weight)


def _dtype(spec: RMSNormSpec, place: Place) -> torch.dtype:
    """Weights that are sums are kept as precise as they are computed."""
    return torch.float32 if spec.weight.offset else place.dtype
