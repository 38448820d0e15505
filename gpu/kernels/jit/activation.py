"""Kernel of gpu.kernels.activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def silu_and_mul(
    gate_up: torch.Tensor, gelu: bool = False, alpha: float = 1.0, limit: float | None = None
) -> torch.Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _silu_and_mul[(num_rows, triton.cdiv(size, BLOCK))](
            output,
            gate_up,
            gate_up.stride(0),
            SIZE=size,
            GELU=gelu,
            ALPHA=alpha,
            LIMIT=limit,
            BLOCK=BLOCK,
        )
    return output


@triton.jit
def _silu_and_mul(
    output_ptr,
    gate_up_ptr,
    row_stride,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if GELU:
        steep = tl.maximum(1.5957691216 * (gate + 0.044715 * gate * gate * gate), -80.0)  # no power overflows
    if LIMIT is not None:  # what is not a number stays so
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = 1.0 + tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        steep = tl.where(gate < -80.0 / ALPHA, -80.0, ALPHA * gate)
    product = gate * tl.sigmoid(steep) * up
    tl.store(output_ptr + row * SIZE + column, product.to(output_ptr.dtype.element_ty), mask=inside)
