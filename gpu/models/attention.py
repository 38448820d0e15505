"""How tokens see each other: a class for each kind of `gpu.checkpoint.architecture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu.attention import AttentionBackend, AttentionMetadata, FusedAttention
from gpu.checkpoint.architecture import AttentionSpec, Heads
from gpu.layers.linear import Linear, RowLinear
from gpu.layers.norm import QKNorm
from gpu.layers.rotary import Rotation, rotate_
from gpu.layers.weights import Place, WeightSlot


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
