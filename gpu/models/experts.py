"""A mixture of experts: which experts take which token, and what they make of it together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu.checkpoint.architecture import ClampedSwiGLUSpec, MoESpec
from gpu.kernels import combine, group_rows, grouped_linear, route
from gpu.layers.activation import clamped_swiglu, silu_and_mul
from gpu.layers.linear import Linear
from gpu.layers.weights import WeightSlot, empty_parameter
from gpu.parallel.communicator import Communicator


class MoE(nn.Module):
    """The layer of a `MoESpec`. A token's result does not depend on what else is in the step, nor on who takes it.

    Of several ranks each has some of the experts whole, or a part of each: it makes of every token what its own make of
    it, and these are added up.
    """

    def __init__(
        self,
        spec: MoESpec,
        communicator: Communicator | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(spec.router, dtype=dtype, device=device)
        network, count = spec.experts[0], len(spec.experts)
        inner, hidden = network.gate.shape
        self.gate_up = empty_parameter(count, 2 * inner, hidden, dtype=dtype, device=device)
        self.down = empty_parameter(count, hidden, inner, dtype=dtype, device=device)
        biases = ((network.gate, 2 * inner), (network.down, hidden))
        self.gate_up_bias, self.down_bias = (
            empty_parameter(count, size, dtype=dtype, device=device) if part.bias else None for part, size in biases
        )
        self._communicator = communicator
        self._clamp = (network.alpha, network.limit) if isinstance(network, ClampedSwiGLUSpec) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        shares, experts = route(self.router(hidden), self.spec.top_k, self.spec.normalized)
        groups = group_rows(experts, len(self.spec.experts), self.spec.first)
        inner = grouped_linear(hidden, self.gate_up, self.gate_up_bias, groups, gather=True)
        inner = silu_and_mul(inner) if self._clamp is None else clamped_swiglu(inner, *self._clamp)
        output = combine(grouped_linear(inner, self.down, self.down_bias, groups, scatter=True), shares)
        if self._communicator is not None:
            self._communicator.all_reduce_(output)
        return output

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for index, network in enumerate(self.spec.experts):
            parts = network.gate, network.up, network.down
            weights = *self.gate_up[index].chunk(2), self.down[index]
            for part, weight in zip(parts, weights, strict=True):
                yield part.weight_name, WeightSlot.into(weight)
            biases = (
                *((None, None) if self.gate_up_bias is None else self.gate_up_bias[index].chunk(2)),
                (None if self.down_bias is None else self.down_bias[index]),
            )
            for part, bias in zip(parts, biases, strict=True):
                if bias is not None:
                    yield f"{part.name}.bias", WeightSlot.into(bias)
