"""A mixture of experts around its matrices: routes, products of rows grouped by expert, and their weighted sum."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton, tl, triton

ROWS = 32  # rows of one expert that a program of the kernel takes at a time
OUTPUTS, COLUMNS = 64, 64
BLOCK = 1024


class Groups(NamedTuple):
    """The M = T * top_k pairs of a token and an expert, ordered by expert. Shapes depend on M alone."""

    order: torch.Tensor  # int64 [M], pairs by their number: token * top_k + place among the token's experts
    starts: torch.Tensor  # int64 [experts + 1], where in `order` an expert's pairs begin
    block_ends: torch.Tensor  # int64 [experts], the number of blocks of `ROWS` pairs up to the end of an expert's
    top_k: int


def route(logits: torch.Tensor, top_k: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: logits [T, experts] -> shares float32 [T, top_k], the largest first, and experts int64 [T,
    top_k].

    Of equal logits the lower expert comes first. With `normalized` the softmax is over the chosen experts alone.
    """
    scores, experts = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    shares = (scores[:, :top_k] if normalized else scores).softmax(-1)
    return shares[:, :top_k].contiguous(), experts[:, :top_k]


def route_in_groups(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int,
    top_groups: int,
    normalized: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts of the best groups, as `gpu.checkpoint.architecture.GroupedMoESpec` has it: logits float32
    [T, experts] and `correction` [experts] -> shares float32 [T, top_k] and experts int64 [T, top_k].

    Of equal scores the lower group or expert comes first.
    """
    scores = logits.softmax(-1) if correction is None else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if top_groups < num_groups:
        of_groups = ranked.unflatten(1, (num_groups, -1))
        best = of_groups.topk(1 if correction is None else 2, -1).values.sum(-1)
        others = best.argsort(dim=-1, descending=True, stable=True)[:, top_groups:]
        ranked = of_groups.scatter(1, others.unsqueeze(2).expand(-1, -1, of_groups.shape[2]), -math.inf).flatten(1)
    experts = ranked.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    shares = scores.gather(1, experts)
    if normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * scale, experts


def group_rows(experts: torch.Tensor, num_experts: int, first: int = 0) -> Groups:
    """Group the experts int64 [T, top_k] of a step's tokens by expert; pairs of one expert keep the tokens' order.

    A rank has the `num_experts` experts from `first` on. Pairs of other ranks' experts come last, in no group.
    """
    own = experts.flatten() - first
    own = own.where((own >= 0) & (own < num_experts), num_experts)
    ordered, order = torch.sort(own, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=experts.device))
    block_ends = ((starts.diff() + (ROWS - 1)) // ROWS).cumsum(0)
    return Groups(order, starts, block_ends, experts.shape[1])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> torch.Tensor:
    """Multiply each pair's row by the matrix of its expert and add its bias: [M, in], [experts, out, in] -> [M, out].

    Rows are in the order of the groups. With `gather` x is [T, in] instead, a row for each token; with `scatter` the
    result is in the order of the pairs' numbers, and zero for pairs in no group. The kernel's bits of a row do not
    depend on the other rows.

    A program has some rows of one expert and some of its outputs. Only the device knows how many blocks of rows an
    expert has, so there are as many programs as there can be blocks; each finds its expert by counting, and the excess
    ends at once.
    """
    if not on_triton(x):
        return grouped_linear_reference(x, weight, bias, groups, gather, scatter)
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


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, gather: bool, scatter: bool
) -> torch.Tensor:
    """Do the work of `grouped_linear` in torch, which waits for the groups on the host."""
    output = x.new_zeros(len(groups.order), weight.shape[1])
    bounds = groups.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            pairs = groups.order[start:end]
            rows = x[pairs // groups.top_k] if gather else x[start:end]
            result = F.linear(rows, weight[expert], None if bias is None else bias[expert])
            output[pairs if scatter else slice(start, end)] = result
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
    before = (ends <= block) & (each < num_experts)  # experts with all of their blocks before this one
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


def combine(pairs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Add up the outputs of each token's experts, times their shares, in their order: [T * top_k, size] in the order of
    the pairs' numbers and float32 [T, top_k] -> [T, size]. In float32, rounded once."""
    if not on_triton(pairs):
        return combine_reference(pairs, shares)
    (num_tokens, top_k), size = shares.shape, pairs.shape[1]
    output = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _combine[grid](output, pairs, shares, size, TOP_K=top_k, BLOCK=BLOCK)
    return output


def combine_reference(pairs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    parts = pairs.float().unflatten(0, shares.shape) * shares.unsqueeze(-1)
    total = parts[:, 0]
    for place in range(1, shares.shape[1]):
        total = total + parts[:, place]
    return total.to(pairs.dtype)


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
