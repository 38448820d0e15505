"""Rotary position embedding (Su et al., arXiv:2104.09864) with the frequency scalings of long-context checkpoints.

Imported by gpu.models. Angles depend on positions only, so all layers of a step share them. Pairs
are (i, i + head_dim / 2), the half-split order of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpu.checkpoint import ModelError, RopeScaling

_POSITIONS_AT_ONCE = 2**16


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position below `max_positions`.

    The table is made for the longest context that is served, not for the longest the checkpoint allows: at 128k
    positions and 128 dimensions it is 64 MiB in bfloat16, at 8k it is 4 MiB. What is served is known when the KV
    cache is, so `resize` makes the table anew.
    """

    table: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._inverse = inverse_frequencies(head_dim, theta, scaling).to(device)
        self.register_buffer("table", torch.empty(2, 0, head_dim, dtype=dtype, device=device), persistent=False)
        self.resize(max_positions)

    def resize(self, max_positions: int) -> None:
        """Make the table as long as `max_positions`."""
        half = self._inverse.shape[0]
        self.table = torch.empty(2, max_positions, 2 * half, dtype=self.table.dtype, device=self.table.device)
        for positions, angles in angles_of(max_positions, self._inverse):
            cos, sin = angles.cos(), angles.sin()
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


def angles_of(max_positions: int, inverse: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Positions and their angles, [positions, head_dim / 2], some at a time: beside a long table is no room for more.

    Computed in float32, to be rounded once: bfloat16 cannot tell positions above 256 apart.
    """
    for start in range(0, max_positions, _POSITIONS_AT_ONCE):
        positions = slice(start, min(start + _POSITIONS_AT_ONCE, max_positions))
        numbers = torch.arange(positions.start, positions.stop, dtype=torch.float32, device=inverse.device)
        yield positions, torch.outer(numbers, inverse)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair, float32 [head_dim / 2], on the CPU.

    Raises ModelError for a `rope_type` that is not implemented.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inverse = 1.0 / theta**exponents
    if scaling is None:
        return inverse
    if scaling.rope_type not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        raise ModelError(f"RoPE scaling {scaling.rope_type!r} is not supported; supported are {supported}, or none.")
    return _SCALINGS[scaling.rope_type](inverse, scaling)


def _scale_linear(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Position interpolation (Chen et al., arXiv:2306.15595)."""
    return inverse / scaling.factor


def _scale_llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: slow down what turns less than `low_freq_factor` times in the original context, leave alone what
    turns more than `high_freq_factor` times, and blend between. The formula of Meta's `apply_scaling`, as
    `rope_type: llama3` has it in Hugging Face."""
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


_SCALINGS: dict[str, Callable[[torch.Tensor, RopeScaling], torch.Tensor]] = {
    "linear": _scale_linear,
    "llama3": _scale_llama3,
}
