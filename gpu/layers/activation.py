"""The gated activations of the feed-forward networks. Imported by gpu.models."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu import kernels
from gpu.kernels.dispatch import on_triton


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU without its matrices (Shazeer, arXiv:2002.05202): [T, 2 * n], gate first -> silu(gate) * up, [T, n]"""
    if on_triton(gate_up):
        return kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GeGLU without its matrices, with the tanh for gelu: [T, 2 * n], gate first -> gelu(gate) * up, [T, n]"""
    if on_triton(gate_up):
        return kernels.gelu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's (`gpu.checkpoint.architecture.ClampedSwiGLUSpec`): [T, 2 * n], gate first -> [T, n]"""
    return kernels.clamped_swiglu(gate_up, alpha, limit)
