"""A matrix product for few rows, beside cuBLAS's. Called by gpu.models.layers; which of the two is chosen by
gpu.device.choices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton
from gpu.kernels.shapes import Tile

MAX_ROWS = 8


# The more outputs, the less often the input is read; the fewer, the more programs there are.
TILES = (Tile(8, 128), Tile(16, 128), Tile(32, 64))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """As `torch.nn.functional.linear`, for [R, in] -> [R, out]: by cuBLAS, or by the kernel if there is a tile and no
    more than `MAX_ROWS` rows.

    A row's result is by the kernel the same bits whatever else is in `x`. Another tile may give others.
    """
    if tile is None or len(x) > MAX_ROWS or not on_triton(x):
        return F.linear(x, weight, bias)
    from gpu.kernels.jit import product

    return product.linear(x, weight, bias, tile)
