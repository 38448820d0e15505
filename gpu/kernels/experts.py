"""A mixture of experts around its matrices: who takes which row, products of rows grouped by expert, and their sum.
Called by gpu.models.blocks."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton
from gpu.kernels.shapes import ROWS, Groups


def route(logits: torch.Tensor, top_k: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> shares float32 [T, top_k], the largest first, and experts int64 [T, top_k].

    Of equal logits the lower expert comes first. `normalized`: the softmax is over the chosen alone.
    """
    scores, experts = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    shares = (scores[:, :top_k] if normalized else scores).softmax(-1)
    return shares[:, :top_k].contiguous(), experts[:, :top_k]


def group_rows(experts: torch.Tensor, num_experts: int, first: int = 0) -> Groups:
    """The experts int64 [T, top_k] of a step's tokens -> their pairs by expert, those of one in the tokens' order.

    Of several ranks each has `num_experts`, from the `first` on. Pairs of others come last, and belong to none.
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
    """Each pair's row by the matrix of its expert, [M, in] and [experts, out, in] -> [M, out], perhaps with a bias.

    Rows lie in the order of the groups. With `gather` x is [T, in] instead, a row for each token; with `scatter` the
    result is in the order of the pairs' numbers, and zero for pairs that belong to no expert. A row's result is by the
    kernel the same bits whatever else is there.
    """
    if on_triton(x):
        from gpu.kernels.jit import experts

        return experts.grouped_linear(x, weight, bias, groups, gather, scatter)
    return grouped_linear_reference(x, weight, bias, groups, gather, scatter)


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, gather: bool, scatter: bool
) -> torch.Tensor:
    """`grouped_linear` in torch, which asks for the groups on the host."""
    output = x.new_zeros(len(groups.order), weight.shape[1])
    bounds = groups.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            pairs = groups.order[start:end]
            rows = x[pairs // groups.top_k] if gather else x[start:end]
            result = F.linear(rows, weight[expert], None if bias is None else bias[expert])
            output[pairs if scatter else slice(start, end)] = result
    return output


def combine(pairs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """What a token's experts made of it, times their shares, added up in their order: [T * top_k, size] in the order of
    the pairs' numbers and float32 [T, top_k] -> [T, size]. In float32, rounded once."""
    if on_triton(pairs):
        from gpu.kernels.jit import experts

        return experts.combine(pairs, shares)
    return combine_reference(pairs, shares)


def combine_reference(pairs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """`combine` in torch."""
    parts = pairs.float().unflatten(0, shares.shape) * shares.unsqueeze(-1)
    total = parts[:, 0]
    for place in range(1, shares.shape[1]):
        total = total + parts[:, place]
    return total.to(pairs.dtype)
