"""Kernel of gpu.kernels.norm: one program per row, which it holds in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, size = residual.shape
    output = torch.empty((num_rows, size), dtype=residual.dtype, device=residual.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(num_rows,)](
            output,
            residual,
            residual if delta is None else delta,
            weight,
            residual.stride(0),
            residual.stride(0) if delta is None else delta.stride(0),
            eps,
            SIZE=size,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return output


@triton.jit
def _add_rms_norm(
    output_ptr,
    residual_ptr,
    delta_ptr,
    weight_ptr,
    residual_stride,
    delta_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + column, x, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    normalized = x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * weight
    tl.store(output_ptr + row * SIZE + column, normalized.to(output_ptr.dtype.element_ty), mask=inside)
