"""Kernel of gpu.kernels.product: a program has some outputs, whose weights it reads once, for all rows.

Rows are padded to the sixteen of a matrix instruction, which costs nothing where reading the weights is what takes the
time, and lets one compilation serve any number of rows. Each of four warps sums a part of the columns, so that even
few outputs keep many bytes on their way; the four sums are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.jit.dependent import launch_options, wait_for_predecessor
from gpu.kernels.shapes import Tile

WARPS = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    (num_rows, in_size), out_size = x.shape, len(weight)
    output = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows:
        _product[(triton.cdiv(out_size, tile.outputs),)](
            output,
            x.contiguous(),
            weight,
            weight if bias is None else bias,
            num_rows,
            in_size,
            out_size,
            HAS_BIAS=bias is not None,
            ROWS=16,
            OUTPUTS=tile.outputs,
            PARTS=WARPS,
            COLUMNS=tile.columns,
            num_warps=WARPS,
            num_stages=4,
            **launch_options(),
        )
    return output


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    output_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    in_size,
    out_size,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    output = tl.arange(0, OUTPUTS)
    in_outputs = first + output < out_size
    weight_ptr += first * in_size
    if PDL:  # nobody writes weights: what comes first may come into the cache while the predecessor ends
        line = tl.minimum(tl.arange(0, 64) * 64, in_size - 1)
        target = weight_ptr + tl.where(in_outputs, output, 0)[:, None] * in_size + line[None, :]
        prefetch: tl.constexpr = "prefetch.global.L2 [$1]; // $0"
        tl.inline_asm_elementwise(prefetch, "=r,l", [target], dtype=tl.int32, is_pure=False, pack=1)
    wait_for_predecessor(PDL)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PARTS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x_ptrs = x_ptr + row[None, :, None] * in_size + column[:, None, :]
    weight_ptrs = weight_ptr + output[None, None, :] * in_size + column[:, :, None]
    total = tl.zeros([PARTS, ROWS, OUTPUTS], tl.float32)
    for start in range(0, in_size, PARTS * COLUMNS):
        inside = start + column < in_size
        x = tl.load(x_ptrs + start, mask=(row < num_rows)[None, :, None] & inside[:, None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=in_outputs[None, None, :] & inside[:, :, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    result = tl.sum(total, 0)
    if HAS_BIAS:
        result += tl.load(bias_ptr + first + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    target = output_ptr + row[:, None] * out_size + (first + output)[None, :]
    tl.store(target, result.to(output_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & in_outputs[None, :])
