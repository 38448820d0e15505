"""RMSNorm with the residual addition, the elementwise half of gated activations, and rows by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton, tl, triton

BLOCK = 1024


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, if given, and return the normalized sum; all [T, size], rows contiguous.

    The sum is rounded to the dtype before it is normalized: x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich,
    arXiv:1910.07467), in float32, rounded once.
    """
    if not on_triton(residual):
        return add_rms_norm_reference(residual, delta, weight, eps)
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


def add_rms_norm_reference(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    if delta is not None:
        residual.add_(delta)
    return F.rms_norm(residual.to(weight.dtype), weight.shape, weight, eps).to(residual.dtype)


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


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (Shazeer, arXiv:2002.05202): [T, 2 * n], gate first, rows contiguous -> [T, n].

    In float32, rounded once.
    """
    if on_triton(gate_up):
        return _launch_silu_and_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up as `silu_and_mul` does, with the tanh approximation: gelu(x) = x sigmoid(2 y), where
    y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if on_triton(gate_up):
        return _launch_silu_and_mul(gate_up, gelu=True)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return (u + 1) g sigmoid(alpha g) as `silu_and_mul` does: g is the gate, at most `limit`; u is `up`, clamped to
    -limit and limit."""
    if on_triton(gate_up):
        return _launch_silu_and_mul(gate_up, alpha=alpha, limit=limit)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (torch.sigmoid(alpha * gate) * gate * (up.clamp(-limit, limit) + 1)).to(gate_up.dtype)


def _launch_silu_and_mul(
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
    if LIMIT is not None:  # a NaN stays a NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = 1.0 + tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        steep = tl.where(gate < -80.0 / ALPHA, -80.0, ALPHA * gate)
    product = gate * tl.sigmoid(steep) * up
    tl.store(output_ptr + row * SIZE + column, product.to(output_ptr.dtype.element_ty), mask=inside)


def gather_rows(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy rows: [R, size] and int32 or int64 [S] -> [S, size], a new contiguous tensor.

    A negative index gives a row of zeros, so that padding needs no row of its own. Other indices must be below R.
    """
    if not on_triton(source):
        rows = source.index_select(0, indices.clamp(min=0))
        return rows.masked_fill_((indices < 0).unsqueeze(1), 0)
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
