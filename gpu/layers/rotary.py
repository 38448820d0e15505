"""Rotary position embedding, by the angles of `gpu.rotary`.

Imported by gpu.models. Angles depend on positions only, so all layers of a step share them. Pairs
are (i, i + head_dim / 2), the half-split order of Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpu.checkpoint import RopeScaling
from gpu.layers.weights import Place
from gpu.rotary import rotations


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position below `max_positions`.

    The table is made for the longest context that is served, not for the longest the checkpoint allows: at 128k
    positions and 128 dimensions it is 64 MiB in bfloat16, at 8k it is 4 MiB. What is served is known when the KV
    cache is, so `resize` makes the table anew.
    """

    table: torch.Tensor

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None, place: Place
    ) -> None:
        super().__init__()
        self._angles = (head_dim, theta, scaling)
        table = torch.empty(2, 0, head_dim, dtype=place.dtype, device=place.device)
        self.register_buffer("table", table, persistent=False)
        self.resize(max_positions)

    def resize(self, max_positions: int) -> None:
        """Make the table as long as `max_positions`."""
        half = self.table.shape[2] // 2
        self.table = torch.empty(2, max_positions, 2 * half, dtype=self.table.dtype, device=self.table.device)
        for positions, *parts in rotations(max_positions, *self._angles):
            cos, sin = (torch.from_numpy(part).to(self.table.device) for part in parts)
            # The sign of the half-split rotation lies in the sine, so that it costs no operation per layer.
            self.table[0, positions, :half] = self.table[0, positions, half:] = cos
            self.table[1, positions, :half], self.table[1, positions, half:] = -sin, sin

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at these positions, int64 [T]."""
        return Rotation(positions, self.table)


@dataclass(frozen=True)
class Rotation:
    """Of the T tokens of a step, for all layers."""

    positions: torch.Tensor  # int64 [T]
    table: torch.Tensor  # [2, max_positions, head_dim], cosines and signed sines

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `rotate_`, each [T, 1, head_dim]; looked up once, and only if they are used."""
        cos, sin = self.table.index_select(1, self.positions).unsqueeze(2).unbind()
        return cos, sin


def rotate_(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate every head of `qk` [T, heads, head_dim] in place: queries and keys side by side, in one call."""
    swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
    qk.mul_(cos).addcmul_(swapped, sin)
