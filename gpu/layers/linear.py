"""Linear layers, merged where one input feeds several of them. Imported by gpu.models.

Whatever form the weight has, a linear layer is `forward` and `weight_slots`: a packed, quantized or sharded one is
another class with these two methods, and models do not see the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from gpu.checkpoint.architecture import Part
from gpu.layers.packed import pack, packed_linear
from gpu.layers.weights import WeightSlot, empty_parameter


class Linear(nn.Module):
    """One or several linear layers on the same input, as one matrix product.

    The parts lie in the output in their order. One large product reads its input once and costs one launch instead of
    three.
    """

    def __init__(self, *parts: Part, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.parts = parts
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if parts[0].bias else None
        self._packed: torch.Tensor | None = None  # instead of `weight` once it is loaded, where that is faster

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., sum of parts]"""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        self._packed = pack(self.weight)
        if self._packed is not None:
            del self.weight

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        rows = [part.shape[0] for part in self.parts]
        for part, weight in zip(self.parts, self.weight.split(rows), strict=True):
            yield f"{part.name}.weight", WeightSlot.into(weight)
        if self.bias is not None:
            for part, bias in zip(self.parts, self.bias.split(rows), strict=True):
                yield f"{part.name}.bias", WeightSlot.into(bias)
