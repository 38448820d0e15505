"""Attention over the paged KV cache: the interface that models call and the metadata of one step.

A backend owns the layout of its cache. Models only hand it queries, keys and values of the step's tokens; `forward`
writes the keys and values to their slots and attends over everything the block tables reach. The backends, in reading
order:

torch_backend   in plain torch: the reference, and what serves where no kernel does
triton_backend  by the kernels of `gpu.kernels`: what serves on CUDA
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step belong, to layers of one KV group (`gpu.kv_layout`). B requests, T tokens in all;
    requests lie one after the other in T.

    The first `num_decodes` requests have exactly one token in this step; the others have more, or none. `seq_lens`
    counts all tokens of a request up to the last one of this step. Entries of `block_table` past a request's length, or
    behind the window of all its queries, are unspecified and must not be read as data.
    """

    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T], block id * block_size + offset
    num_decodes: int
    # The same lengths on the host, so that no backend has to read them back from the device. A graph may be for any
    # lengths: then these lists are empty, and `num_decodes`, which only the device knows, is 0.
    query_lens_list: list[int]  # [B]
    seq_lens_list: list[int]  # [B]

    @classmethod
    def of_groups(
        cls, *, block_tables: torch.Tensor, slot_mappings: torch.Tensor, **shared: Any
    ) -> list[AttentionMetadata]:
        """Of each KV group: `block_tables` is [groups, B, max_blocks], `slot_mappings` [groups, T]."""
        tables = zip(block_tables, slot_mappings, strict=True)
        return [cls(block_table=table, slot_mapping=slots, **shared) for table, slots in tables]


class PlainAttention(Protocol):
    """Attention with heads of one kind (`gpu.checkpoint.architecture.Heads`); one object serves all layers of it."""

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The zeroed cache of one layer, in the layout of this backend."""
        ...

    def forward(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim], rotated
        key: torch.Tensor,  # [T, num_kv_heads, head_dim], rotated
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # this layer's, from allocate_kv_cache
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,  # float32 [num_heads], see `gpu.checkpoint.architecture.AttentionSpec`
    ) -> torch.Tensor:
        """Store key and value, attend causally, return [T, num_heads, head_dim]."""
        ...


@runtime_checkable
class FusedAttention(Protocol):
    """A backend that takes the merged projection as it is, where a kernel rotates and stores in one pass."""

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def forward_fused(
        self,
        qkv: torch.Tensor,  # [T, num_heads + 2 * num_kv_heads, head_dim], queries first; may be overwritten
        positions: torch.Tensor,  # int64 [T]
        rotary_table: torch.Tensor,  # [2, max_positions, head_dim], cosines and signed sines
        qk_norm: torch.Tensor | None,  # [2, head_dim], RMSNorm weights of query and key heads
        eps: float,  # of these norms
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,  # as above
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, then as `PlainAttention.forward`: [T, num_heads, head_dim]."""
        ...


AttentionBackend = PlainAttention | FusedAttention
