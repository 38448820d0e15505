"""A transformer's layer: attention, feed-forward network, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from gpu.attention import AttentionBackend, AttentionMetadata, TritonAttention
from gpu.checkpoint import ModelError
from gpu.checkpoint.architecture import (
    AttentionSpec,
    ClampedSwiGLUSpec,
    GatedAttentionSpec,
    GatedDeltaSpec,
    GeGLUSpec,
    GroupedMoESpec,
    Heads,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MoESpec,
    ShortConvSpec,
    SwiGLUSpec,
)
from gpu.checkpoint.gemma_layers import NormedAttentionSpec, SparseGeGLUSpec
from gpu.kernels import Groups, clamped_swiglu, combine, group_rows, grouped_linear, route, route_in_groups
from gpu.models import layers
from gpu.models.state_layers import GatedDeltaNet, Mamba2, ShortConv, StateLayer
from gpu.sharding import Communicator, share

T = TypeVar("T")

ALL_TO_ALL_TOKENS = 1025  # one more than the largest CUDA graph (`gpu.device.graphs`)


def exchanges(num_tokens: int, size: int, top_k: int) -> bool:
    """Return True if `size` ranks with whole experts exchange the rows of a step, instead of each computing its experts
    for all rows and adding up the results.

    For each token one of n ranks sends (n - 1) / n x (1 + 2 top_k / n) activations for an exchange, and 2 (n - 1) / n
    for a sum. For few tokens latency decides, and a sum has less: it is one collective, and the host does not wait.
    """
    return num_tokens >= ALL_TO_ALL_TOKENS and size > 2 * top_k


class MoE(nn.Module):
    """The layer of a `MoESpec`. A token's result depends neither on other tokens of the step nor on the rank.

    Each of several ranks has some whole experts, or a part of each. It computes its experts for all tokens, and the
    results of all ranks are added up. If that sends more than an exchange (`exchanges`), it routes its share of the
    tokens, sends each to the ranks with its experts, and adds up the returned rows in the order of a single rank. The
    host waits for the routing to know the numbers of rows; a CUDA graph would need padding for all rows to one rank.
    """

    def __init__(self, spec: MoESpec, place: layers.Place) -> None:
        super().__init__()
        self.spec = spec
        self.router = layers.Linear(spec.router, place=place)
        network, count = spec.experts[0], len(spec.experts)
        inner, hidden = network.gate.shape
        self.gate_up = place.parameter(count, 2 * inner, hidden)
        self.down = place.parameter(count, hidden, inner)
        biases = ((network.gate, 2 * inner), (network.down, hidden))
        self.gate_up_bias, self.down_bias = (
            place.parameter(count, size) if part.bias else None for part, size in biases
        )
        # int64 [experts]: the tokens of each expert, on all ranks. The decoder counts the chosen experts of a step,
        # int64 [T, top_k], unless they are None.
        self.num_tokens = torch.zeros(spec.router.shape[0], dtype=torch.int64, device=place.device)
        self.chosen: torch.Tensor | None = None
        self._communicator = place.communicator
        self._is_spread = count < spec.router.shape[0]
        self._activation = (
            partial(clamped_swiglu, alpha=network.alpha, limit=network.limit)
            if isinstance(network, ClampedSwiGLUSpec)
            else (layers.gelu_and_mul if isinstance(network, GeGLUSpec) else layers.silu_and_mul)
        )
        self.shared = None if spec.shared is None else SwiGLU(spec.shared, replace(place, communicator=None))
        self.shared_gate = None if spec.shared_gate is None else layers.Linear(spec.shared_gate, place=place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        ranks = self._communicator
        if ranks is not None and self._is_spread and exchanges(len(hidden), ranks.size, self.spec.top_k):
            return self._exchanged(hidden, ranks)
        shares, experts = self._route(hidden)
        self.chosen = experts
        groups = group_rows(experts, len(self.spec.experts), self.spec.first)
        output = combine(self._experts(hidden, groups), shares)
        if self.shared is not None:
            output += self._shared(hidden)
        if ranks is not None:
            ranks.all_reduce_(output)
        return output

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares and the experts of each token (`gpu.kernels.route`)."""
        return route(self.router(hidden), self.spec.top_k, self.spec.normalized)

    def _experts(self, hidden: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[T, hidden] -> [M, hidden], in the order of the pairs' numbers, zero for pairs of other ranks' experts"""
        inner = grouped_linear(hidden, self.gate_up, self.gate_up_bias, groups, gather=True)
        return grouped_linear(self._activation(inner), self.down, self.down_bias, groups, scatter=True)

    def _shared(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute this rank's part of the shared expert."""
        assert self.shared is not None
        shared = self.shared(hidden)
        return shared if self.shared_gate is None else shared.mul_(self.shared_gate(hidden).sigmoid_())

    def _exchanged(self, hidden: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        """Compute the layer as `forward` does, by all-to-all."""
        num_experts, top_k = self.spec.router.shape[0], self.spec.top_k
        tokens = [share(len(hidden), ranks.size, rank) for rank in range(ranks.size)]
        owned = [share(num_experts, ranks.size, rank) for rank in range(ranks.size)]

        own = hidden[slice(*tokens[ranks.rank])]
        shares, experts = self._route(own)
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
        output = ranks.all_gather(output, [(last - first) * size for first, last in tokens]).view(-1, size)
        if self.shared is not None:
            shared = self._shared(hidden)
            ranks.all_reduce_(shared)
            output += shared
        return output

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, network in enumerate(self.spec.experts):
            parts = network.gate, network.up, network.down
            weights = *self.gate_up[index].chunk(2), self.down[index]
            for part, weight in zip(parts, weights, strict=True):
                yield part.weight_name, weight
            biases = (
                *((None, None) if self.gate_up_bias is None else self.gate_up_bias[index].chunk(2)),
                (None if self.down_bias is None else self.down_bias[index]),
            )
            for part, bias in zip(parts, biases, strict=True):
                if bias is not None:
                    yield f"{part.name}.bias", bias


class GroupedMoE(MoE):
    """The layer of a `GroupedMoESpec`. The router computes in float32."""

    spec: GroupedMoESpec

    def __init__(self, spec: GroupedMoESpec, place: layers.Place) -> None:
        super().__init__(spec, place)
        self.router = layers.Linear(spec.router, place=replace(place, dtype=torch.float32))
        count = spec.router.shape[0]
        self.correction = None if spec.correction is None else place.parameter(count, dtype=torch.float32)

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        return route_in_groups(
            self.router(hidden.float()),
            self.correction,
            spec.top_k,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            normalized=spec.normalized,
            scale=spec.scale,
        )

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().weight_slots()
        if self.correction is not None and self.spec.correction is not None:
            yield self.spec.correction.weight_name, self.correction


# ------------------------------------------------------------------------------------------------------------ attention
# A class for each kind of attention of `gpu.checkpoint.architecture`.


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, spec: AttentionSpec, backend: Callable[[Heads], AttentionBackend], place: layers.Place) -> None:
        super().__init__()
        self.heads = heads = spec.heads
        self.num_qk_heads = heads.query + heads.kv
        self.backend = backend(heads)
        self.qkv = layers.Linear(*spec.qkv, place=place)
        norms, each = spec.qk_norm or (), not spec.norm_together
        self.qk_norm = layers.QKNorm(spec.qk_norm, heads, place) if spec.qk_norm is not None and each else None
        self.norms_together = nn.ModuleList([] if each else [layers.RMSNorm(norm, place) for norm in norms])
        self.out = layers.RowLinear(spec.out, place)
        self.spec = spec
        self.sinks = None if spec.sinks is None else place.parameter(heads.query, dtype=torch.float32)

    def forward(
        self, hidden: torch.Tensor, rotation: layers.Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        heads = self.qkv(hidden).unflatten(-1, (-1, self.heads.dim))
        parts = heads.split([self.heads.query, self.heads.kv, self.heads.kv], 1)
        for normed, part in zip(self.norms_together, parts, strict=False):
            part.copy_(normed(part.flatten(1)).view_as(part))
        if isinstance(self.backend, TritonAttention):
            norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
            output = self.backend.forward_fused(
                heads,
                rotation.positions,
                rotation.table,
                norm,
                eps,
                kv_cache,
                metadata,
                self.sinks,
                rotation.query_scales,
            )
            return self.out(output.flatten(1))
        qk, value = heads[:, : self.num_qk_heads], heads[:, self.num_qk_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        layers.rotate_(qk, *rotation.angles)
        query, key = qk[:, : self.heads.query], qk[:, self.heads.query :]
        if rotation.query_scales is not None:
            query *= rotation.query_scales[rotation.positions].to(query.dtype).view(-1, 1, 1)
        return self.out(self.backend.forward(query, key, value, kv_cache, metadata, self.sinks).flatten(1))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.sinks is not None and self.spec.sinks is not None:
            yield self.spec.sinks.weight_name, self.sinks


class GatedSelfAttention(SelfAttention):
    """Attention with an output gate for each query head, and positions in the first dimensions of a head."""

    def forward(
        self, hidden: torch.Tensor, rotation: layers.Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        assert not isinstance(self.backend, TritonAttention)
        count, size = self.heads.query, self.heads.dim
        heads = self.qkv(hidden).unflatten(-1, (-1, size))
        gated, value = heads[:, : 2 * count], heads[:, 2 * count + self.heads.kv :]
        qk = torch.cat((gated[:, ::2], heads[:, 2 * count : 2 * count + self.heads.kv]), 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        layers.rotate_(qk[..., : self.spec.rope.size], *rotation.angles)
        output = self.backend.forward(qk[:, :count], qk[:, count:], value, kv_cache, metadata)
        return self.out(output.mul_(gated[:, 1::2].sigmoid()).flatten(1))


class NormedSelfAttention(SelfAttention):
    """Attention with normalized values, which may be keys, or with the keys and values of another layer."""

    def __init__(self, spec: AttentionSpec, backend: Callable[[Heads], AttentionBackend], place: layers.Place) -> None:
        super().__init__(replace(spec, qk_norm=None), backend, place)
        self.norms = nn.ModuleList(layers.RMSNorm(norm, place) for norm in spec.qk_norm or ())
        self.epsilon = spec.qk_norm[-1].eps if spec.qk_norm else 0.0

    def forward(
        self, hidden: torch.Tensor, rotation: layers.Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        assert not isinstance(self.backend, TritonAttention)
        heads = self.qkv(hidden).unflatten(-1, (-1, self.heads.dim))
        query, key, value = heads[:, : self.heads.query], None, None
        if len(self.norms) > 1:
            value = F.rms_norm(heads[:, -self.heads.kv :], (self.heads.dim,), None, self.epsilon)
            key = self.norms[1](heads[:, self.heads.query : self.num_qk_heads])
            layers.rotate_(key, *rotation.angles)
        query = self.norms[0](query)
        layers.rotate_(query, *rotation.angles)
        return self.out(self.backend.forward(query, key, value, kv_cache, metadata).flatten(1))


class LatentAttention(nn.Module):
    """The layer of a `LatentAttentionSpec`: a cache of one latent for each token, and one key for all heads.

    With keys and values of each head, attention of a chunk of 512 tokens took 0.5 to 0.6 of the time in V2-Lite's shape
    (one core). That would be a second path, for prompts alone.
    """

    def __init__(
        self, spec: LatentAttentionSpec, backend: Callable[[Heads], AttentionBackend], place: layers.Place
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend(spec.heads)
        query, latent, expand = spec.qkv
        self.query_norm = self.query = None
        if spec.query_latent is not None:
            self.query, self.query_norm = layers.Linear(query, place=place), layers.RMSNorm(spec.query_latent[1], place)
            query = spec.query_latent[0]
        self.projections = layers.Linear(query, latent, place=place)
        self.latent_norm = layers.RMSNorm(spec.latent_norm, place)
        self.expand = place.parameter(*expand.shape)
        self.out = layers.RowLinear(spec.out, place)

    def forward(
        self, hidden: torch.Tensor, rotation: layers.Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        assert not isinstance(self.backend, TritonAttention)
        heads, size = self.spec.heads, self.spec.latent_norm.weight.shape[0]
        values, rotating = self.spec.out.shape[1] // heads.query, heads.dim - size
        projected = self.projections(hidden)
        query, latent, key = projected.split((projected.shape[1] - heads.dim, size, rotating), 1)
        if self.query is not None and self.query_norm is not None:
            query = self.query(self.query_norm(query))
        query = query.unflatten(1, (heads.query, -1))
        rotated = torch.cat((query[..., -rotating:], key.unsqueeze(1)), 1)
        if self.spec.interleaved:  # queries and keys are reordered alike, so that no score changes
            rotated = rotated.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        layers.rotate_(rotated, *rotation.angles)
        to_keys, to_values = self.expand.unflatten(0, (heads.query, -1)).tensor_split((-values,), 1)
        plain = (query[..., :-rotating].transpose(0, 1) @ to_keys).transpose(0, 1)  # [T, heads, size]
        keys = torch.cat((self.latent_norm(latent).unsqueeze(1), rotated[:, -1:]), 2)
        queries = torch.cat((plain, rotated[:, :-1]), 2)
        attended = self.backend.forward(queries, keys, None, kv_cache, metadata)  # [T, heads, size]
        output = attended.transpose(0, 1) @ to_values.transpose(1, 2)
        return self.out(output.transpose(0, 1).flatten(1))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.spec.qkv[2].weight_name, self.expand


ATTENTION: dict[type, type[SelfAttention] | type[LatentAttention] | type[StateLayer]] = {
    AttentionSpec: SelfAttention,
    NormedAttentionSpec: NormedSelfAttention,
    GatedAttentionSpec: GatedSelfAttention,
    LatentAttentionSpec: LatentAttention,
    GatedDeltaSpec: GatedDeltaNet,
    Mamba2Spec: Mamba2,
    ShortConvSpec: ShortConv,
}


# --------------------------------------------------------------------------------------------------------- feed forward
# A class for each kind of feed-forward network of `gpu.checkpoint.architecture`.


class SwiGLU(nn.Module):
    """The gated network of Llama (Shazeer, arXiv:2002.05202)."""

    def __init__(self, spec: SwiGLUSpec, place: layers.Place) -> None:
        super().__init__()
        self.gate_up = layers.Linear(spec.gate, spec.up, place=place)
        self.down = layers.RowLinear(spec.down, place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(layers.silu_and_mul(self.gate_up(hidden)))


class GeGLU(SwiGLU):
    """The gated network of Gemma: gelu, approximated by a tanh, instead of silu."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(layers.gelu_and_mul(self.gate_up(hidden)))


class SparseGeGLU(SwiGLU):
    """GeGLU of which only the largest activations remain."""

    def __init__(self, spec: SparseGeGLUSpec, place: layers.Place) -> None:
        super().__init__(spec, place)
        self._deviations = spec.deviations

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        gate_up = self.gate_up(hidden)
        gate = gate_up[:, : gate_up.shape[1] // 2]
        std, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
        gate.sub_(mean + std * self._deviations).relu_()
        return self.down(layers.gelu_and_mul(gate_up))


FEED_FORWARD: dict[type, Callable[..., SwiGLU | MoE]] = {
    SwiGLUSpec: SwiGLU,
    GeGLUSpec: GeGLU,
    SparseGeGLUSpec: SparseGeGLU,
    MoESpec: MoE,
    GroupedMoESpec: GroupedMoE,
}


# --------------------------------------------------------------------------------------------------------------- layers


class LayerInputs(NamedTuple):
    """The inputs of a layer in a step, apart from the residual stream."""

    rotation: layers.Rotation
    metadata: Any  # of the layer's KV group
    kv_cache: torch.Tensor
    vectors: torch.Tensor | None  # [T, size], the tokens' embeddings for this layer (Gemma 3n and 4)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, with their norms."""

    def __init__(self, spec: LayerSpec, attention: Callable[[Heads], AttentionBackend], place: layers.Place) -> None:
        super().__init__()
        mixer, network = _implemented(ATTENTION, spec.attention), _implemented(FEED_FORWARD, spec.feed_forward)
        self.attention = mixer(spec.attention, attention, place)
        self.feed_forward = network(spec.feed_forward, place)
        norms = (spec.attention_norm, spec.attention_post_norm, spec.feed_forward_norm, spec.feed_forward_post_norm)
        self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm = (
            None if norm is None else layers.RMSNorm(norm, place) for norm in norms
        )

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None, given: LayerInputs) -> torch.Tensor | None:
        """Add `delta`, the output of the layer before, to `residual` [T, hidden] in place. The output of this layer is
        returned instead of added, so that the next norm adds and normalizes in one pass. None: it was added."""
        return self.feed(residual, self.attend(normed(self.attention_norm, residual, delta), given))

    def attend(self, hidden: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        """Return what attention adds to the residual stream; `hidden` is its normalized input."""
        output: torch.Tensor = self.attention(hidden, given.rotation, given.metadata, given.kv_cache)
        return output if self.attention_post_norm is None else self.attention_post_norm(output)

    def feed(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add `delta` to `residual` in place, and return what the feed-forward network adds."""
        output = self.network(normed(self.feed_forward_norm, residual, delta), residual)
        return output if self.feed_forward_post_norm is None else self.feed_forward_post_norm(output)

    def network(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Compute the feed-forward network of `hidden`, the normalized `residual`."""
        output: torch.Tensor = self.feed_forward(hidden)
        return output


def normed(norm: layers.RMSNorm | None, residual: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
    """Add `delta` to `residual` in place, and return the sum, normalized if there is a norm."""
    if norm is not None:
        return norm(residual, delta)
    return residual if delta is None else residual.add_(delta)


def _implemented(kinds: Mapping[type, T], spec: object) -> T:
    if type(spec) not in kinds:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise ModelError(f"A layer of the kind {type(spec).__name__} is not implemented; there are {known}.")
    return kinds[type(spec)]
