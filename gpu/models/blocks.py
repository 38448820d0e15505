"""Attention, feed-forward network and experts of a transformer's layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu.attention import AttentionBackend, AttentionMetadata, FusedAttention
from gpu.checkpoint.architecture import AttentionSpec, ClampedSwiGLUSpec, GeGLUSpec, Heads, MoESpec, SwiGLUSpec
from gpu.kernels import Groups, combine, group_rows, grouped_linear, route
from gpu.models.layers import (
    Linear,
    Place,
    QKNorm,
    Rotation,
    RowLinear,
    WeightSlot,
    clamped_swiglu,
    gelu_and_mul,
    rotate_,
    silu_and_mul,
)
from gpu.sharding import Communicator, share

ALL_TO_ALL_TOKENS = 513  # more than a CUDA graph is captured for (`gpu.device.graphs`)


def exchanges(num_tokens: int, size: int, top_k: int) -> bool:
    """Whether so many ranks that have experts whole exchange the rows of a step, instead of adding up what each makes
    of all.

    Of n ranks one sends (n - 1) / n x (1 + 2 top_k / n) activations for each token, and for a sum 2 (n - 1) / n. A step
    of few tokens is all latency, of which a sum has less: it is one collective, and asks the device for nothing.
    """
    return num_tokens >= ALL_TO_ALL_TOKENS and size > 2 * top_k


class MoE(nn.Module):
    """The layer of a `MoESpec`. A token's result does not depend on what else is in the step, nor on who takes it.

    Of several ranks each has some of the experts whole, or a part of each: it makes of every token what its own make of
    it, and these are added up. Or, where that sends less (`exchanges`), it takes its share of the tokens, sends each to
    the ranks that have its experts, and adds up what comes back as one rank would. How many rows go where is known when
    they have been routed, so the host waits for it; in a CUDA graph every exchange would have to be padded to the most
    there could be, all rows to one rank.
    """

    def __init__(self, spec: MoESpec, place: Place) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(spec.router, place=place)
        network, count = spec.experts[0], len(spec.experts)
        inner, hidden = network.gate.shape
        self.gate_up = place.parameter(count, 2 * inner, hidden)
        self.down = place.parameter(count, hidden, inner)
        biases = ((network.gate, 2 * inner), (network.down, hidden))
        self.gate_up_bias, self.down_bias = (
            place.parameter(count, size) if part.bias else None for part, size in biases
        )
        # int64 [experts]: tokens that each has had, of all ranks. Those chosen in a step, int64 [T, top_k], are counted
        # by whoever has all layers, unless they are None.
        self.num_tokens = torch.zeros(spec.router.shape[0], dtype=torch.int64, device=place.device)
        self.chosen: torch.Tensor | None = None
        self._communicator = place.communicator
        self._is_spread = count < spec.router.shape[0]
        self._clamp = (network.alpha, network.limit) if isinstance(network, ClampedSwiGLUSpec) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        ranks = self._communicator
        if ranks is not None and self._is_spread and exchanges(len(hidden), ranks.size, self.spec.top_k):
            return self._exchanged(hidden, ranks)
        shares, experts = route(self.router(hidden), self.spec.top_k, self.spec.normalized)
        self.chosen = experts
        groups = group_rows(experts, len(self.spec.experts), self.spec.first)
        output = combine(self._experts(hidden, groups), shares)
        if ranks is not None:
            ranks.all_reduce_(output)
        return output

    def _experts(self, hidden: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[T, hidden] -> [M, hidden], in the order of the pairs' numbers, zero for pairs of others' experts"""
        inner = grouped_linear(hidden, self.gate_up, self.gate_up_bias, groups, gather=True)
        inner = silu_and_mul(inner) if self._clamp is None else clamped_swiglu(inner, *self._clamp)
        return grouped_linear(inner, self.down, self.down_bias, groups, scatter=True)

    def _exchanged(self, hidden: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        """`forward`, by all-to-all."""
        num_experts, top_k = self.spec.router.shape[0], self.spec.top_k
        tokens = [share(len(hidden), ranks.size, rank) for rank in range(ranks.size)]
        owned = [share(num_experts, ranks.size, rank) for rank in range(ranks.size)]

        own = hidden[slice(*tokens[ranks.rank])]
        shares, experts = route(self.router(own), top_k, self.spec.normalized)
        groups = group_rows(experts, num_experts)  # so by rank, too
        counts = ranks.all_gather(groups.starts.diff(), [num_experts] * ranks.size).view(ranks.size, num_experts)
        self.chosen = None
        self.num_tokens += counts.sum(0)
        sizes = [[sum(of_rank[first:last]) for first, last in owned] for of_rank in counts.tolist()]
        rows = ranks.all_to_all(own[groups.order // top_k], sizes)

        here = torch.arange(len(self.spec.experts), device=rows.device).repeat(ranks.size)
        of_rows = here.repeat_interleave(counts[:, slice(*owned[ranks.rank])].flatten(), output_size=len(rows))
        made = self._experts(rows, group_rows(of_rows.unsqueeze(1), len(self.spec.experts)))
        returned = ranks.all_to_all(made, [list(of_rank) for of_rank in zip(*sizes, strict=True)])
        pairs = torch.empty_like(returned).index_copy_(0, groups.order, returned)
        output = combine(pairs, shares).flatten()
        size = hidden.shape[1]
        return ranks.all_gather(output, [(last - first) * size for first, last in tokens]).view(-1, size)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for index, network in enumerate(self.spec.experts):
            parts = network.gate, network.up, network.down
            weights = *self.gate_up[index].chunk(2), self.down[index]
            for part, weight in zip(parts, weights, strict=True):
                yield part.weight_name, WeightSlot.into(weight)
            biases = (
                *((None, None) if self.gate_up_bias is None else self.gate_up_bias[index].chunk(2)),
                (None if self.down_bias is None else self.down_bias[index]),
            )
            for part, bias in zip(parts, biases, strict=True):
                if bias is not None:
                    yield f"{part.name}.bias", WeightSlot.into(bias)


# ------------------------------------------------------------------------------------------------------------ attention
# How tokens see each other: a class for each kind of `gpu.checkpoint.architecture`.


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, spec: AttentionSpec, backend: Callable[[Heads], AttentionBackend], place: Place) -> None:
        super().__init__()
        self.heads = heads = spec.heads
        self.num_qk_heads = heads.query + heads.kv
        self.backend = attention = backend(heads)
        self.fused = attention if isinstance(attention, FusedAttention) else None
        self.plain = None if isinstance(attention, FusedAttention) else attention
        self.qkv = Linear(*spec.qkv, place=place)
        self.qk_norm = None if spec.qk_norm is None else QKNorm(spec.qk_norm, heads, place)
        self.out = RowLinear(spec.out, place)
        self.spec = spec
        self.sinks = None if spec.sinks is None else place.parameter(heads.query, dtype=torch.float32)

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        heads = self.qkv(hidden).unflatten(-1, (-1, self.heads.dim))
        if self.fused is not None:
            norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
            output = self.fused.forward_fused(
                heads, rotation.positions, rotation.table, norm, eps, kv_cache, metadata, self.sinks
            )
            return self.out(output.flatten(1))
        qk, value = heads[:, : self.num_qk_heads], heads[:, self.num_qk_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        rotate_(qk, *rotation.angles)
        query, key = qk[:, : self.heads.query], qk[:, self.heads.query :]
        assert self.plain is not None
        return self.out(self.plain.forward(query, key, value, kv_cache, metadata, self.sinks).flatten(1))

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        if self.sinks is not None and self.spec.sinks is not None:
            yield self.spec.sinks.weight_name, WeightSlot.into(self.sinks)


ATTENTION: dict[type, type[SelfAttention]] = {AttentionSpec: SelfAttention}


# --------------------------------------------------------------------------------------------------------- feed forward
# What a layer does with each token by itself: a class for each kind of `gpu.checkpoint.architecture`.


class SwiGLU(nn.Module):
    """The gated network of Llama (Shazeer, arXiv:2002.05202)."""

    def __init__(self, spec: SwiGLUSpec, place: Place) -> None:
        super().__init__()
        self.gate_up = Linear(spec.gate, spec.up, place=place)
        self.down = RowLinear(spec.down, place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(silu_and_mul(self.gate_up(hidden)))


class GeGLU(SwiGLU):
    """Gemma's: gelu, approximated by a tanh, instead of silu."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(gelu_and_mul(self.gate_up(hidden)))


FEED_FORWARD: dict[type, Callable[..., SwiGLU | MoE]] = {SwiGLUSpec: SwiGLU, GeGLUSpec: GeGLU, MoESpec: MoE}
