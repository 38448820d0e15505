"""Products of few rows with a matrix that is not quantized. Reading the matrix from memory takes most of their time.

On an H100 the products of an 8B model took 0.90 of cuBLAS's time for one row, and 0.94 for 2 to 16 rows; for 32 rows
cuBLAS is faster (docs/benchmarks/gpu.md). For small products, cuBLAS splits the inputs and needs a second kernel to add
up the parts; these kernels do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels import prefill
from gpu.kernels.dispatch import on_triton, tl, triton

LEAST_BYTES = 2**20  # size of a matrix; for smaller ones these kernels are no faster
MOST_ROWS = 16  # rows of a matrix instruction; fewer rows take as long
COLUMNS = 1024  # inputs that a program of one row reads at once; an A100 reads half, for lack of registers


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`: [R, in] -> [R, out], summed in float32.

    A kernel multiplies one row in any type, and up to `MOST_ROWS` rows in types of 16 bits. cuBLAS multiplies more
    rows, and small matrices.
    """
    most = MOST_ROWS if x.element_size() == 2 else 1
    if not on_triton(x) or not 0 < len(x) <= most or weight.nbytes < LEAST_BYTES or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    (num_rows, in_size), out_size = x.shape, len(weight)
    output = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    operands = (output, x.contiguous(), weight, weight if bias is None else bias)
    if num_rows == 1:
        most = COLUMNS // 2 if prefill.capability_of(x.device) == (8, 0) else COLUMNS
        columns = min(most, triton.next_power_of_2(in_size))
        _one_row[(triton.cdiv(out_size, 2),)](
            *operands,
            in_size,
            out_size,
            HAS_BIAS=bias is not None,
            WHOLE=in_size % columns == 0,
            OUTPUTS=2,
            COLUMNS=columns,
        )
        return output
    _few_rows[(triton.cdiv(out_size, 16),)](
        *operands,
        num_rows,
        in_size,
        out_size,
        HAS_BIAS=bias is not None,
        WHOLE=in_size % 512 == 0,
        ROWS=MOST_ROWS,
        OUTPUTS=16,
        PARTS=4,
        COLUMNS=128,
    )
    return output


@triton.jit(do_not_specialize=["out_size"])
def _one_row(
    output_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    in_size,
    out_size,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    in_outputs = output < out_size
    weight_ptrs = weight_ptr + output[:, None] * in_size + column[None, :]
    total = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for start in range(0, in_size, COLUMNS):
        inside = column < COLUMNS if WHOLE else start + column < in_size
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptrs + start, mask=in_outputs[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += weight * x[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + output, mask=in_outputs, other=0.0).to(tl.float32)
    tl.store(output_ptr + output, result.to(output_ptr.dtype.element_ty), mask=in_outputs)


# Each of four warps adds up a quarter of the inputs, so that many reads are in flight even for few outputs.
@triton.jit(do_not_specialize=["num_rows", "out_size"])
def _few_rows(
    output_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    in_size,
    out_size,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_ptr += tl.program_id(0).to(tl.int64) * OUTPUTS * in_size
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PARTS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_outputs, in_rows = (output < out_size)[None, None, :], (row < num_rows)[None, :, None]
    x_ptrs = x_ptr + row[None, :, None] * in_size + column[:, None, :]
    weight_ptrs = weight_ptr + tl.arange(0, OUTPUTS)[None, None, :] * in_size + column[:, :, None]
    total = tl.zeros([PARTS, ROWS, OUTPUTS], tl.float32)
    for start in range(0, in_size, PARTS * COLUMNS):
        if WHOLE:
            x = tl.load(x_ptrs + start, mask=in_rows, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=in_outputs, other=0.0)
        else:
            inside = start + column < in_size
            x = tl.load(x_ptrs + start, mask=in_rows & inside[:, None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=in_outputs & inside[:, :, None], other=0.0)
        total = tl.dot(x, weight, total)
    result = tl.sum(total, 0)
    if HAS_BIAS:
        result += tl.load(bias_ptr + output, mask=output < out_size, other=0.0).to(tl.float32)[None, :]
    target = output_ptr + row[:, None] * out_size + output[None, :]
    tl.store(target, result.to(output_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & (output < out_size)[None])
