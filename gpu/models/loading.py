"""Fills a model from a stream of checkpoint tensors and proves that nothing was left out. Imported by gpu.models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from gpu.checkpoint import ModelError
from gpu.layers.weights import HoldsWeights, Packs, WeightSlot

NAMES_SHOWN = 8  # of each kind in an error: one missing layer alone has a dozen names


class WeightsMismatch(ModelError):
    """The tensors of a checkpoint are not those of the model. The message names them."""


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every tensor that the model needs, by its checkpoint name."""
    return {
        name: slot
        for layer in model.modules()
        if isinstance(layer, HoldsWeights)
        for name, slot in layer.weight_slots()
    }


@torch.inference_mode()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *, ignored: Iterable[str] = ()) -> None:
    """Take in each tensor of `weights`, one at a time, so that no more than one need be in memory besides the model.

    Names that end in one of `ignored` are skipped. Raises WeightsMismatch, after the last tensor, unless every slot was
    filled exactly once and nothing else came.
    """
    waiting = weight_slots(model)
    known = frozenset(waiting)
    suffixes = tuple(ignored)
    problems = _Problems()
    for name, tensor in weights:
        if name.endswith(suffixes):
            continue
        if name not in known:
            problems.unexpected.append(name)
        elif name not in waiting:
            problems.repeated.append(name)
        else:
            slot = waiting.pop(name)
            if tuple(tensor.shape) == slot.shape:
                slot.load(tensor)
            else:
                problems.misshapen.append(f"{name} is {list(tensor.shape)}, needs {list(slot.shape)}")
    problems.missing.extend(waiting)
    problems.raise_if_any()
    for layer in model.modules():
        if isinstance(layer, Packs):
            layer.pack()


@dataclass
class _Problems:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(self) -> None:
        parts = []
        for kind, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("given twice", self.repeated),
            ("wrong shape", self.misshapen),
        ):
            if names:
                more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                parts.append(f"{len(names)} {kind}: {', '.join(names[:NAMES_SHOWN])}{more}")
        if parts:
            raise WeightsMismatch(f"The checkpoint does not fit its configuration: {'; '.join(parts)}.")
