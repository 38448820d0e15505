"""Linear layers, merged where one input feeds several of them. Imported by gpu.models.

Whatever form the weight has, a linear layer is `forward` and `weight_slots`: a packed, quantized or sharded one is
another class with these two methods, and models do not see the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu.checkpoint.architecture import Part
from gpu.kernels import linear
from gpu.kernels.product import Tile
from gpu.layers.packed import pack, packed_linear
from gpu.layers.weights import Place, WeightSlot


class Product(nn.Module):
    """A matrix, and how something is multiplied by it. Made by the layers that own one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.tile: Tile | None = None  # of the kernel for few rows, where that is faster (`gpu.device.choices`)
        self._packed: torch.Tensor | None = None  # instead of `weight` once it is loaded, where that is faster

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, out_features]"""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return linear(x, self.weight, self.bias, self.tile)

    def pack(self) -> None:
        self._packed = pack(self.weight)
        if self._packed is not None:
            del self.weight


class Linear(Product):
    """One or several linear layers on the same input, as one matrix product.

    The parts lie in the output in their order. One large product reads its input once and costs one launch instead of
    three.
    """

    def __init__(self, *parts: Part, place: Place) -> None:
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        super().__init__(
            place.parameter(out_features, in_features), place.parameter(out_features) if parts[0].bias else None
        )
        self.parts = parts

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        rows = [part.shape[0] for part in self.parts]
        for part, weight in zip(self.parts, self.weight.split(rows), strict=True):
            yield part.weight_name, WeightSlot.into(weight)
        if self.bias is not None:
            for part, bias in zip(self.parts, self.bias.split(rows), strict=True):
                yield f"{part.name}.bias", WeightSlot.into(bias)


class RowLinear(Linear):
    """A linear layer whose inputs lie on several ranks: each multiplies its own, and the products are added up."""

    def __init__(self, part: Part, place: Place) -> None:
        super().__init__(part, place=place)
        self._communicator = place.communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features of this rank] -> [R, out_features]"""
        product = super().forward(x)
        if self._communicator is not None:
            self._communicator.all_reduce_(product)
        return product
