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
from gpu.layers.weights import WeightSlot, empty_parameter


class Embedding(nn.Module):
    """One row per token of the vocabulary."""

    def __init__(self, part: Part, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.part = part
        self.weight = empty_parameter(*part.shape, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden], a new tensor"""
        if on_triton(self.weight):
            return gather_rows(self.weight, input_ids)
        return F.embedding(input_ids, self.weight)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{self.part.name}.weight", WeightSlot.into(self.weight)


class LMHead(Product):
    """Scores each token of the vocabulary, [R, hidden] -> [R, vocab]; with its own matrix, or with the embedding's
    where it has no `part`."""

    def __init__(
        self, part: Part | None, embedding: Embedding, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        weight = embedding.weight if part is None else empty_parameter(*part.shape, dtype=dtype, device=device)
        super().__init__(weight)
        self.part = part

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        if self.part is not None:
            yield f"{self.part.name}.weight", WeightSlot.into(self.weight)
