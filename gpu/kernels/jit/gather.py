"""Kernel of gpu.kernels.gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def gather_rows(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    num_rows, size = len(indices), source.shape[1]
    output = torch.empty((num_rows, size), dtype=source.dtype, device=source.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, BLOCK))
        _gather_rows[grid](output, source, indices, source.stride(0), SIZE=size, BLOCK=BLOCK)
    return output


@triton.jit
def _gather_rows(output_ptr, source_ptr, indices_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    index = tl.load(indices_ptr + row).to(tl.int64)
    values = tl.zeros([BLOCK], source_ptr.dtype.element_ty)
    if index >= 0:
        values = tl.load(source_ptr + index * row_stride + column, mask=inside, other=0.0)
    tl.store(output_ptr + row * SIZE + column, values, mask=inside)
