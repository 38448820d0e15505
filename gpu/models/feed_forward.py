"""What a layer does with each token by itself: a class for each kind of `gpu.checkpoint.architecture`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpu.checkpoint.architecture import GeGLUSpec, MoESpec, SwiGLUSpec
from gpu.layers.activation import gelu_and_mul, silu_and_mul
from gpu.layers.linear import Linear, RowLinear
from gpu.layers.weights import Place
from gpu.models.experts import MoE


class SwiGLU(nn.Module):
    """The gated network of Llama (Shazeer, arXiv:2002.05202)."""

    def __init__(self, spec: SwiGLUSpec, place: Place) -> None:
        super().__init__()
        self.gate_up = Linear(spec.gate, spec.up, place=place)
        self.down = RowLinear(spec.down, place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(silu_and_mul(self.gate_up(hidden)))


class GeGLU(SwiGLU):
    """Gemma's: gelu, approximated by a tanh, instead of silu."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(gelu_and_mul(self.gate_up(hidden)))


FEED_FORWARD: dict[type, Callable[..., SwiGLU | MoE]] = {SwiGLUSpec: SwiGLU, GeGLUSpec: GeGLU, MoESpec: MoE}
