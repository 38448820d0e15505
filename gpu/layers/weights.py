"""The way of a checkpoint tensor into a layer. Implemented by the layers, walked by models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gpu.parallel.communicator import Communicator


@dataclass(frozen=True)
class WeightSlot:
    """The place of one checkpoint tensor: the shape it must have, and how it is taken in.

    `load` copies and converts dtype and device; it keeps no reference to the tensor. A layer that packs its weights
    does so in its own `load`.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]

    @staticmethod
    def into(target: torch.Tensor) -> WeightSlot:
        """The slot of a tensor that is kept as it comes, in `target`: a parameter, or rows of a merged one."""
        return WeightSlot(tuple(target.shape), target.copy_)


@runtime_checkable
class HoldsWeights(Protocol):
    """A layer that takes tensors from a checkpoint."""

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Everything that this layer holds, by the checkpoint's names."""
        ...


@runtime_checkable
class Packs(Protocol):
    """A layer that keeps its weight in another form for computing."""

    def pack(self) -> None:
        """Called once, when all weights of the model are loaded."""
        ...


def weight_slots(model: torch.nn.Module) -> dict[str, WeightSlot]:
    """Every tensor that the model needs, by its checkpoint name."""
    layers = (layer for layer in model.modules() if isinstance(layer, HoldsWeights))
    return {name: slot for layer in layers for name, slot in layer.weight_slots()}


@dataclass(frozen=True)
class Place:
    """Where the weights of a model are: in which type, on which device, and who has the other parts of them."""

    dtype: torch.dtype
    device: torch.device | str
    communicator: Communicator | None = None  # to the other tensor ranks; None: there are none

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialized weight: whatever loads the model writes all of it, so no time goes into random values."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
