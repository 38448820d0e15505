"""The layout of ranks, and the part of each tensor that a rank holds.

A pipeline stage has some of the layers. A tensor rank has some heads and inner features of each, and a part of the
vocabulary. Heads are split by KV group; if there are fewer KV heads than ranks, several ranks share one. Nothing has to
divide evenly. Matrices after heads and inner features are sharded in one of two ways:

1. By their inputs (row parallel, Megatron-LM, arXiv:1909.08053): every rank has partial sums, which an all-reduce adds.
2. By their outputs (column parallel), like all other matrices: the inputs are all-gathered first, and each output is
   the same sum in the same order for any number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import ConfigError
from gpu.checkpoint import architecture
from gpu.checkpoint.gemma_layers import NormedAttentionSpec
from gpu.checkpoint.tensors import ranges_of, sliced, text_name

if TYPE_CHECKING:
    import torch

    from gpu.checkpoint.tensors import Weight


Range = tuple[int, int]

TILE = 16  # outputs that the C++ library computes together: shards are whole tiles
BLOCK = 32  # inputs that share a scale in most quantized types: shards are whole blocks if each rank can have one
STEP_TOKENS = 8  # stages are balanced for steps of so many tokens


def sharded(spec: architecture.DecoderSpec, layout: Layout, *, gathers: bool) -> architecture.DecoderSpec:
    """Return this rank's shard of a model: the shapes of its tensors, and their ranges in the checkpoint's tensors.
    With `gathers`, every matrix is column parallel. Raises ConfigError if the model has too few parts for the ranks."""
    if layout.world_size == 1:
        return spec
    _check_ranks(spec, layout)
    cutter = _Cutter(layout.tensor_parallel_size, layout.tp_rank, gathers, layout.enable_expert_parallel)
    first, last = stages(spec, layout.pipeline_parallel_size)[layout.pp_rank]
    has_embedding = layout.is_first_stage or (layout.is_last_stage and spec.head is None)
    return replace(
        spec,
        embedding=spec.embedding and cutter.vocabulary(spec.embedding) if has_embedding else None,
        layers=tuple(cutter.layer(layer) for layer in spec.layers[first:last]),
        norm=spec.norm if layout.is_last_stage else None,
        head=spec.head and cutter.vocabulary(spec.head) if layout.is_last_stage else None,
        first_layer=first,
    )


def check_cuts(spec: architecture.DecoderSpec, layout: Layout, *, gathers: bool) -> None:
    """Raise ConfigError if the model cannot be sharded like this, or has no experts for expert parallelism."""
    if layout.enable_expert_parallel and not any(
        isinstance(layer.feed_forward, architecture.MoESpec) for layer in spec.layers
    ):
        raise ConfigError(
            "enable_expert_parallel",
            True,
            allowed="this model has no experts",
            hint="enable_expert_parallel=false works",
        )
    _check_ranks(spec, layout)
    stages(spec, layout.pipeline_parallel_size)
    sharded(spec, replace(layout, pipeline_parallel_size=1, rank=0), gathers=gathers)


def _check_ranks(spec: architecture.DecoderSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that several ranks, or several stages, cannot compute."""
    if spec.state_bytes and layout.pipeline_parallel_size > 1:
        setting, allowed = "pipeline_parallel_size", "a model with states has one stage"
        raise ConfigError(setting, layout.pipeline_parallel_size, allowed=allowed, hint=f"{setting}=1 works")
    if layout.world_size > 1 and any(isinstance(layer.attention, NormedAttentionSpec) for layer in spec.layers):
        setting = "tensor_parallel_size" if layout.tensor_parallel_size > 1 else "pipeline_parallel_size"
        allowed = "Gemma 3n and 4 run on one rank"
        raise ConfigError(setting, getattr(layout, setting), allowed=allowed, hint=f"{setting}=1 works")


def cut(weights: Iterable[tuple[str, Weight]], spec: architecture.DecoderSpec) -> Iterator[tuple[str, Weight]]:
    """Yield the shard of each weight that a rank's `spec` describes. Weights without a shard on it are not read."""
    ranges = ranges_of(spec)
    for given, weight in weights:
        name = text_name(given)
        if name in ranges:
            yield name, sliced(weight, ranges[name])


def stages(spec: architecture.DecoderSpec, count: int) -> list[Range]:
    """Split the layers into `count` stages of at least one layer each, so that the largest weight volume that one stage
    reads in a step is as small as possible, head included. The embedding is not counted: a step reads one row of it
    per token. Raises ConfigError."""
    if count > len(spec.layers):
        raise ConfigError(
            "pipeline_parallel_size",
            count,
            allowed=f"it must not exceed the model's {len(spec.layers)} layers",
            hint=f"pipeline_parallel_size={len(spec.layers)} works",
        )
    costs = [weights_read(layer) for layer in spec.layers]
    head = spec.head or spec.embedding
    costs[-1] += math.prod(head.shape) if head is not None else 0

    @cache
    def ends(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Return the least cost that the largest of `left` stages can have, from layer `first` on, and their ends."""
        if left == 1:
            return sum(costs[first:]), (len(costs),)
        return min(
            (max(sum(costs[first:end]), rest), (end, *further))
            for end in range(first + 1, len(costs) - left + 2)
            for rest, further in [ends(end, left - 1)]
        )

    places = (0, *ends(0, count)[1])
    return list(itertools.pairwise(places))


def weights_read(layer: architecture.LayerSpec) -> int:
    """Return the number of a layer's weights that a step of `STEP_TOKENS` tokens reads; for experts, the expected
    number if each token goes to `top_k` random experts."""
    network, weights = layer.feed_forward, sum(math.prod(part.shape) for part in architecture.parts_of(layer))
    if not isinstance(network, architecture.MoESpec):
        return weights
    of_experts = sum(math.prod(part.shape) for part in architecture.parts_of(network.experts))
    return weights - round(of_experts * (1 - network.top_k / len(network.experts)) ** STEP_TOKENS)


@dataclass(frozen=True)
class _Cutter:
    """Shards layers for one tensor rank."""

    size: int
    rank: int
    gathers: bool
    whole_experts: bool

    def layer(self, layer: architecture.LayerSpec) -> architecture.LayerSpec:
        attention, network = layer.attention, layer.feed_forward
        if missing := {type(attention), type(network)} - CUTS.keys():
            allowed = f"{missing.pop().__name__.removesuffix('Spec')} layers do not support tensor parallelism"
            raise ConfigError("tensor_parallel_size", self.size, allowed=allowed, hint="tensor_parallel_size=1 works")
        attention, network = CUTS[type(attention)](self, attention), CUTS[type(network)](self, network)
        return replace(layer, attention=attention, feed_forward=network)

    def attention(self, spec: architecture.AttentionSpec) -> architecture.AttentionSpec:
        if spec.norm_together and self.size > 1:
            raise ConfigError(
                "tensor_parallel_size",
                self.size,
                allowed="this model's norms of queries and keys are over all heads, so one rank must have them all",
                hint="tensor_parallel_size=1 works, and pipeline_parallel_size splits it by layers",
            )
        queries, kv = self.heads(spec.heads.query, spec.heads.kv)
        query, key, value = spec.qkv
        # Latents are one head, which every rank has, and the matrix from latents has keys and values by query head.
        latent = isinstance(spec, architecture.LatentAttentionSpec)
        of_values, value_heads = (queries, spec.heads.query) if latent else (kv, spec.heads.kv)
        return replace(
            spec,
            heads=replace(spec.heads, query=queries[1] - queries[0], kv=kv[1] - kv[0]),
            qkv=(
                outputs(query, _rows(query.shape[0] // spec.heads.query, queries)),
                outputs(key, _rows(key.shape[0] // spec.heads.kv, kv)),
                outputs(value, _rows(value.shape[0] // value_heads, of_values)),
            ),
            out=self.after(spec.out, _rows(spec.out.shape[1] // spec.heads.query, queries)),
            sinks=spec.sinks and outputs(spec.sinks, queries),
        )

    def delta_net(self, spec: architecture.GatedDeltaSpec) -> architecture.GatedDeltaSpec:
        """Spread key heads, with their value heads. Each matrix and vector has equally many rows for each."""
        most = 1 if spec.tiled else spec.key_heads
        if self.size > most:
            reason = f"it must not exceed the {most} key heads of a gated delta net"
            if spec.tiled:
                reason = "GGUF files of Qwen3.5 have the value heads of a key head apart, so one rank has them all"
            hint = f"tensor_parallel_size={most} works"
            raise ConfigError("tensor_parallel_size", self.size, allowed=reason, hint=hint)
        first, last = share(spec.key_heads, self.size, self.rank)

        def own(part: architecture.Part) -> architecture.Part:
            rows = part.shape[0] // spec.key_heads
            return outputs(part, (first * rows, last * rows))

        columns = spec.out.shape[1] // spec.key_heads
        return replace(
            spec,
            key_heads=last - first,
            value_heads=spec.value_heads // spec.key_heads * (last - first),
            projections=tuple(map(own, spec.projections)),
            conv=tuple(map(own, spec.conv)),
            dt_bias=own(spec.dt_bias),
            a_log=own(spec.a_log),
            out=self.after(spec.out, (first * columns, last * columns)),
        )

    def heads(self, query: int, kv: int) -> tuple[Range, Range]:
        """Return the query heads and the KV heads of this rank."""
        if self.size > query:
            raise ConfigError(
                "tensor_parallel_size",
                self.size,
                allowed=f"it must not exceed the model's {query} query heads",
                hint=f"tensor_parallel_size={kv} works",
            )
        group = query // kv
        if self.size <= kv:
            first, last = share(kv, self.size, self.rank)
            return (first * group, last * group), (first, last)
        # Several ranks share a KV head and divide its queries; no head has two ranks more than another.
        of_group = [share(self.size, kv, index) for index in range(kv)]
        index, (begin, end) = next((i, bounds) for i, bounds in enumerate(of_group) if self.rank < bounds[1])
        first, last = share(group, end - begin, self.rank - begin)
        return (index * group + first, index * group + last), (index, index + 1)

    def gated(self, spec: architecture.SwiGLUSpec) -> architecture.SwiGLUSpec:
        inner = self.features(spec.gate.shape[0], BLOCK if self.gathers else None)
        gate, up = outputs(spec.gate, inner), outputs(spec.up, inner)
        return replace(spec, gate=gate, up=up, down=self.after(spec.down, inner))

    def experts(self, spec: architecture.MoESpec) -> architecture.MoESpec:
        """Spread whole experts over the ranks; without expert parallelism, and if sums may be partial, shard each
        expert like a dense network. Every rank has the router."""
        shared = spec.shared
        if shared is not None and self.gathers:
            shared = shared if self.rank == self.size - 1 else None
        elif shared is not None:
            shared = self.gated(shared)
        if not (self.whole_experts or self.gathers):
            return replace(spec, experts=tuple(map(self.gated, spec.experts)), shared=shared)
        if self.size > len(spec.experts):
            raise ConfigError(
                "tensor_parallel_size",
                self.size,
                allowed=f"it must not exceed the {len(spec.experts)} experts of a layer, which the ranks share out",
                hint=f"tensor_parallel_size={len(spec.experts)} works",
            )
        first, last = share(len(spec.experts), self.size, self.rank)
        return replace(spec, experts=spec.experts[first:last], first=first, shared=shared)

    def after(self, part: architecture.Part, columns: Range) -> architecture.Part:
        """Shard a matrix that follows heads or inner features; this rank computes `columns` of its inputs."""
        if self.gathers:
            return outputs(part, self.features(part.shape[0]))
        # Partial sums are added up, and only rank 0's has the bias.
        return _cut(replace(part, bias=part.bias and self.rank == 0), -1, columns)

    def vocabulary(self, part: architecture.Part) -> architecture.Part:
        return outputs(part, vocabulary(part.shape[0], self.size)[self.rank])

    def features(self, size: int, unit: int | None = None) -> Range:
        return features(size, self.size, self.rank, unit)


# The cutter's method for each kind of attention and of feed-forward network.
CUTS: dict[type, Callable[[_Cutter, Any], Any]] = {
    architecture.AttentionSpec: _Cutter.attention,
    architecture.GatedAttentionSpec: _Cutter.attention,
    architecture.LatentAttentionSpec: _Cutter.attention,
    architecture.GatedDeltaSpec: _Cutter.delta_net,
    architecture.SwiGLUSpec: _Cutter.gated,
    architecture.GeGLUSpec: _Cutter.gated,
    architecture.MoESpec: _Cutter.experts,
    architecture.GroupedMoESpec: _Cutter.experts,
}


def share(count: int, ranks: int, rank: int) -> Range:
    """Return a rank's range of `count` things; no rank has two more than another."""
    each, more = divmod(count, ranks)
    return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)


def features(size: int, ranks: int, rank: int, unit: int | None = None) -> Range:
    """Return a rank's range of features, made of whole units. Raises ConfigError for fewer units than ranks."""
    unit = unit or (BLOCK if size % BLOCK == 0 and size // BLOCK >= ranks else TILE)
    count = -(-size // unit)
    if ranks > count:
        raise ConfigError(
            "tensor_parallel_size",
            ranks,
            allowed=f"{size} features of this model are split into units of {unit}, and each rank needs one unit",
            hint=f"tensor_parallel_size={count} works",
        )
    first, last = share(count, ranks, rank)
    return first * unit, min(last * unit, size)


def vocabulary(size: int, ranks: int) -> list[Range]:
    """Return the token ids of each tensor rank. Raises ConfigError for too few tokens."""
    return [features(size, ranks, rank) for rank in range(ranks)]


def _rows(each: int, heads: Range) -> Range:
    """Return the rows of heads that have so many `each`."""
    return heads[0] * each, heads[1] * each


def outputs(part: architecture.Part, rows: Range) -> architecture.Part:
    """Return these outputs of a matrix, or these elements of a vector, with their bias."""
    return _cut(part, 0, rows)


def _cut(part: architecture.Part, dimension: int, bounds: Range) -> architecture.Part:
    ranges = list(part.ranges or ((0, size) for size in part.shape))
    if ranges[dimension] == bounds:
        return part
    ranges[dimension] = bounds
    return replace(part, shape=tuple(stop - start for start, stop in ranges), ranges=tuple(ranges))


# --------------------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parallel sizes, and this rank's number in the world.

    A model's layers are divided among pipeline stages, and each layer among the tensor ranks of its stage, which have
    consecutive numbers. Raises ConfigError for sizes below 1.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False  # the tensor ranks of a stage have whole experts instead of parts of each
    rank: int = 0

    def __post_init__(self) -> None:
        for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (value := getattr(self, setting)) < 1:
                raise ConfigError(setting, value, allowed="it must be at least 1", hint=f"{setting}=1 works")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no rank {self.rank} of {self.world_size}")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pipeline_parallel_size - 1


class Communicator(Protocol):
    """Collectives of the `size` tensor ranks of a stage, for one thread at a time. All ranks make the same calls in the
    same order. A call raises RankLost if another rank misses its deadline."""

    rank: int
    size: int

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """`tensor` becomes the sum over all ranks: the same bits on each."""

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """[..., sizes[rank]] of each rank -> [..., sum of sizes], in the order of the ranks."""

    def all_to_all(self, rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rank a sends rank b `sizes[a][b]` rows: [sum of sizes[rank], n], in the order of their destinations ->
        [sum of sizes[a][rank] over a, n], in the order of their sources."""
