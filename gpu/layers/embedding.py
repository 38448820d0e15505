"""The two ends of a model: token ids to vectors, and vectors to logits. Imported by gpu.models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from gpu.kernels import gather_rows
from gpu.kernels.dispatch import on_triton
from gpu.layers.packed import pack, packed_linear
from gpu.layers.weights import WeightSlot, empty_parameter


class Embedding(nn.Module):
    """One row per token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden], a new tensor"""
        if on_triton(self.weight):
            return gather_rows(self.weight, input_ids)
        return F.embedding(input_ids, self.weight)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.weight", WeightSlot.into(self.weight)


class LMHead(nn.Module):
    """Scores each token of the vocabulary; with its own matrix, or with the embedding's if `tied_to` is given."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.weight = (
            tied_to.weight if tied_to else empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)
        )

        self._packed: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab]"""
        if self._packed is not None:
            return packed_linear(hidden, self._packed)
        return F.linear(hidden, self.weight)

    def pack(self) -> None:
        self._packed = pack(self.weight)
        if self._packed is not None and not self.tied:
            del self.weight

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        if not self.tied:
            yield f"{path}.weight", WeightSlot.into(self.weight)
