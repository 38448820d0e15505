"""Rows by index: of the embedding for token ids, of the hidden states for the tokens that sample."""

from __future__ import annotations

import torch

from gpu.kernels.dispatch import on_triton


def gather_rows(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy rows: [R, size] and int32 or int64 [S] -> [S, size], a new contiguous tensor.

    A negative index gives a row of zeros, so that padding needs no row of its own. Other indices must be below R.
    """
    if on_triton(source):
        from gpu.kernels.jit import gather

        return gather.gather_rows(source, indices)
    return gather_rows_reference(source, indices)


def gather_rows_reference(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`gather_rows` in torch."""
    rows = source.index_select(0, indices.clamp(min=0))
    return rows.masked_fill_((indices < 0).unsqueeze(1), 0)
