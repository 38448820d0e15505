"""Kernels of gpu.kernels.experts: a program has some rows of one expert and some of its outputs, or a part of a token.

How many blocks of rows an expert has is known on the device alone. So there are as many programs as there may ever be
blocks, each finds its expert by counting, and those that are too many have nothing to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu.kernels.shapes import ROWS, Groups

OUTPUTS, COLUMNS = 64, 64
BLOCK = 1024


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, gather: bool, scatter: bool
) -> torch.Tensor:
    num_pairs, (num_experts, out_size, in_size) = len(groups.order), weight.shape
    make = torch.zeros if scatter else torch.empty
    output = make((num_pairs, out_size), dtype=x.dtype, device=x.device)
    if num_pairs:
        most_blocks = min(num_pairs, num_pairs // ROWS + num_experts)
        _grouped_linear[(most_blocks, triton.cdiv(out_size, OUTPUTS))](
            output,
            x.contiguous(),
            weight,
            weight if bias is None else bias,
            groups.order,
            groups.starts,
            groups.block_ends,
            num_experts,
            in_size,
            out_size,
            TOP_K=groups.top_k,
            HAS_BIAS=bias is not None,
            GATHER=gather,
            SCATTER=scatter,
            EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            COLUMNS=COLUMNS if x.itemsize == 2 else COLUMNS // 2,  # wider rows of 4-byte numbers would spill registers
            num_warps=4,
        )
    return output


def combine(pairs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    (num_tokens, top_k), size = shares.shape, pairs.shape[1]
    output = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _combine[grid](output, pairs, shares, size, TOP_K=top_k, BLOCK=BLOCK)
    return output


@triton.jit
def _grouped_linear(
    output_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    block_ends_ptr,
    num_experts,
    in_size,
    out_size,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    ends = tl.load(block_ends_ptr + each, mask=each < num_experts, other=0)
    before = (ends <= block) & (each < num_experts)  # experts all of whose blocks come before this one
    expert = tl.sum(before.to(tl.int32), 0)
    if expert == num_experts:
        return
    start = tl.load(starts_ptr + expert) + (block - tl.max(tl.where(before, ends, 0), 0)) * ROWS
    place = start + tl.arange(0, ROWS)
    in_rows = place < tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + place, mask=in_rows, other=0)
    row = pair // TOP_K if GATHER else place

    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_outputs = output < out_size
    column = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * in_size + column[None, :]
    first = (expert.to(tl.int64) * out_size + output) * in_size
    weight_ptrs = weight_ptr + first[None, :] + column[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for done in range(0, in_size, COLUMNS):
        inside = done + column < in_size
        x = tl.load(x_ptrs + done, mask=in_rows[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + done, mask=in_outputs[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * out_size + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    target = (pair if SCATTER else place).to(tl.int64)
    target_ptrs = output_ptr + target[:, None] * out_size + output[None, :]
    tl.store(target_ptrs, total.to(output_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@triton.jit
def _combine(output_ptr, pairs_ptr, shares_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        values = tl.load(pairs_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(shares_ptr + pair) * values
    tl.store(output_ptr + token * size + column, total.to(output_ptr.dtype.element_ty), mask=inside)
