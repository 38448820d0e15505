"""Rotary position embedding (Su et al., arXiv:2104.09864) with the frequency scalings of long-context checkpoints.

Imported by gpu.models. Angles depend on positions only, so all layers of a step share them. Pairs
are (i, i + head_dim / 2), the half-split order of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpu.config import RopeScaling
from gpu.weights.errors import ModelError


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position below `max_positions`.

    The table is made for the longest context that is served, not for the longest the checkpoint allows: at 128k
    positions and 128 dimensions it is 64 MiB in bfloat16, at 8k it is 4 MiB.
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
        inverse = inverse_frequencies(head_dim, theta, scaling).to(device)
        # Computed in float32 and rounded once: bfloat16 cannot tell positions above 256 apart.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), inverse)
        cos, sin = angles.cos(), angles.sin()
        # The sign of the half-split rotation lies in the sine, so that it costs no operation per layer.
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))
        self.register_buffer("table", table.to(dtype), persistent=False)

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
