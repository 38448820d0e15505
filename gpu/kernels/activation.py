"""The elementwise half of SwiGLU, GeGLU and the clamped SwiGLU. Imported by gpu.models.layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, arXiv:2002.05202): [T, 2 * n], gate first, rows contiguous -> [T, n].

    In float32, rounded once.
    """
    if on_triton(gate_up):
        from gpu.kernels.jit import activation

        return activation.silu_and_mul(gate_up)
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, with gelu(x) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3): the tanh approximation."""
    if on_triton(gate_up):
        from gpu.kernels.jit import activation

        return activation.silu_and_mul(gate_up, gelu=True)
    return gelu_and_mul_reference(gate_up)


def gelu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_and_mul` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """As `silu_and_mul`, but (u + 1) g sigmoid(alpha g): g is gate, limit at most, u is up within -limit and limit."""
    if on_triton(gate_up):
        from gpu.kernels.jit import activation

        return activation.silu_and_mul(gate_up, alpha=alpha, limit=limit)
    return clamped_swiglu_reference(gate_up, alpha, limit)


def clamped_swiglu_reference(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`clamped_swiglu` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (torch.sigmoid(alpha * gate) * gate * (up.clamp(-limit, limit) + 1)).to(gate_up.dtype)
