"""Residual addition and RMSNorm in one pass over the residual stream. Imported by gpu.models.layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, if given, and return the normalized sum; all [T, size], rows contiguous.

    The sum is rounded to the dtype before it is normalized, as if the two were apart: x / sqrt(mean(x**2) + eps) *
    weight (Zhang and Sennrich, arXiv:1910.07467), in float32, rounded once.
    """
    if on_triton(residual):
        from gpu.kernels.jit import norm

        return norm.add_rms_norm(residual, delta, weight, eps)
    return add_rms_norm_reference(residual, delta, weight, eps)


def add_rms_norm_reference(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`add_rms_norm` in torch."""
    if delta is not None:
        residual.add_(delta)
    return F.rms_norm(residual.to(weight.dtype), weight.shape, weight, eps).to(residual.dtype)
