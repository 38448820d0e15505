"""The two ends of a model: token ids to vectors, and vectors to logits. Imported by gpu.models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from gpu.checkpoint.architecture import Part
from gpu.kernels import gather_rows
from gpu.kernels.dispatch import on_triton
from gpu.layers.linear import Product
from gpu.layers.weights import Place, WeightSlot


class Embedding(nn.Module):
    """One row per token of the vocabulary, times a scale, which is rounded to the dtype as Hugging Face does. Each
    tensor rank has the rows of some tokens."""

    def __init__(self, part: Part, scale: float, place: Place) -> None:
        super().__init__()
        self.part = part
        self._communicator = place.communicator
        self._first_token = 0 if part.ranges is None else part.ranges[0][0]
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=place.dtype).item()
        self.weight = place.parameter(*part.shape)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden], a new tensor"""
        gather = gather_rows if on_triton(self.weight) else _embedding
        if self._communicator is None:
            rows = gather(self.weight, input_ids)
        else:
            own = input_ids - self._first_token
            others = (own < 0) | (own >= len(self.weight))
            rows = gather(self.weight, own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0.0)
            self._communicator.all_reduce_(rows)
        return rows if self._scale is None else rows.mul_(self._scale)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield self.part.weight_name, WeightSlot.into(self.weight)


def _embedding(weight: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(input_ids, weight)


class LMHead(Product):
    """Scores each token of the vocabulary, or of this rank's part of it, [R, hidden] -> [R, vocab]; with its own
    matrix, or with the embedding's where it has no `part`."""

    def __init__(self, part: Part | None, embedding: Embedding | None, place: Place) -> None:
        if part is not None:
            super().__init__(place.parameter(*part.shape))
        else:
            assert embedding is not None
            super().__init__(embedding.weight)
        self.part = part

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        if self.part is not None:
            yield self.part.weight_name, WeightSlot.into(self.weight)
