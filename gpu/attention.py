"""Attention over the paged KV cache.

The torch backend is the reference, and is used where no kernel runs. It gathers keys and values through the block table
and calls torch's scaled-dot-product attention. The Triton backend calls the kernels of `gpu.kernels`. Both promise:

1. Only the slots of a request's own tokens are read, never a slot past its length. Free blocks may hold anything, even
   NaN: a mask would not suffice, because 0 * NaN is NaN.
2. A request's result does not depend on other requests of the batch, except in the last bits of a float: padding adds
   exact zeros, but may change the order of a sum.
3. Memory beyond the cache is bounded by the tokens that one decode group or one chunk sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.checkpoint.architecture import Heads
from gpu.kernels import AttentionWork, list_attention_work, paged_attention, rope_and_cache

# Decodes of unequal length share one call if padding adds at most a quarter to the gathered keys, or at most 256
# tokens: for a small model on a CPU, that costs as much as another call.
FREE_PADDING = 256
PADDING_SHARE = 0.25

# Queries of a prefill chunk per call. A call computes scores for all keys that its last query sees: large tiles waste
# work above the diagonal, small tiles split the product. 256 was nearly best for chunks of 512 up to a context of 2048.
TILE = 256
# Query heads of one key that a call takes together, as the rows of one product. Bounds the memory of scores.
HEADS = 16


class TorchAttention:
    """Attention for heads of one kind; all layers with such heads share one object. A layer's cache is [num_blocks,
    block_size, 2, num_kv_heads, head_dim], keys first; without values if those are a part of keys (`Heads.values`)."""

    def __init__(self, heads: Heads, block_size: int) -> None:
        self.heads = heads
        self.block_size = block_size
        self.group_size = heads.query // heads.kv
        # The plan that a step's layers share, and the metadata it was made from (kept so that its id is not reused).
        self._plan: tuple[AttentionMetadata, _Plan] | None = None

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the zeroed cache of one layer."""
        heads = self.heads
        return zeros((num_blocks, self.block_size, 1 if heads.values else 2, heads.kv, heads.dim), dtype, device)

    def forward(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim], rotated
        # [T, num_kv_heads, head_dim], rotated; None: another layer has stored key and value
        key: torch.Tensor | None,
        value: torch.Tensor | None,  # [T, num_kv_heads, head_dim]; None: it is a part of the key, or stored already
        kv_cache: torch.Tensor,  # this layer's, from allocate_kv_cache
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,  # float32 [num_heads], see `gpu.checkpoint.architecture.AttentionSpec`
    ) -> torch.Tensor:
        """Store key and value, attend causally, return [T, num_heads, numbers of a value]."""
        plan = self._plan_for(metadata, query.dtype)
        slots = kv_cache.flatten(0, 1)  # [num_slots, 2, num_kv_heads, head_dim]
        if key is not None:
            slots[:, 0].index_copy_(0, metadata.slot_mapping, key)
        if value is not None:
            slots[:, 1].index_copy_(0, metadata.slot_mapping, value)
        output = query.new_empty(*query.shape[:2], self.heads.values or self.heads.dim)
        if sinks is not None:
            sinks = sinks.view(self.heads.kv, self.group_size, 1)
        for group in plan.decodes:
            self._decode(query, slots, group, sinks, output)
        for chunk in plan.chunks:
            self._prefill(query, slots, chunk, sinks, output)
        return output

    def _decode(
        self,
        query: torch.Tensor,
        slots: torch.Tensor,
        group: _DecodeGroup,
        sinks: torch.Tensor | None,  # [kv_heads, group_size, 1]
        output: torch.Tensor,
    ) -> None:
        """Attend with one query of each of B requests, padded to L keys. Query heads of a KV head form one product."""
        batch = group.rows.shape[0]
        kv = slots.index_select(0, group.slots).unflatten(0, (batch, -1))  # [B, L, 2, kv_heads, head_dim]
        kv = kv.transpose(1, 3)
        key, value = kv[:, :, 0], kv[:, :, -1, :, : self.heads.values]  # [B, kv_heads, L, head_dim]
        rows = query.index_select(0, group.rows).unflatten(1, (self.heads.kv, self.group_size))
        attended = self._attend(rows, key, value, group.mask, sinks)
        output.index_copy_(0, group.rows, attended.flatten(1, 2))

    def _prefill(
        self,
        query: torch.Tensor,
        slots: torch.Tensor,
        chunk: _Chunk,
        sinks: torch.Tensor | None,  # [kv_heads, group_size, 1]
        output: torch.Tensor,
    ) -> None:
        """Attend with all queries of one request, tile by tile. The batch dimension is KV heads; query heads that share
        a KV head read its keys through a stride of zero."""
        kv = slots.index_select(0, chunk.slots)  # [L, 2, kv_heads, head_dim]
        if self.heads.values:
            self._prefill_latents(query, kv[:, 0, 0], chunk, output)
            return
        key, value = kv.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, self.group_size, -1, -1)
        heads = (self.heads.kv, self.group_size)
        for tile in chunk.tiles:
            attended = self._attend(
                query[tile.rows].unflatten(1, heads).permute(1, 2, 0, 3),  # [kv_heads, group_size, rows, head_dim]
                key[:, :, tile.keys],
                value[:, :, tile.keys],
                tile.mask,
                None if sinks is None else sinks.unsqueeze(-1),
            )
            output[tile.rows].unflatten(1, heads).copy_(attended.permute(2, 0, 1, 3))

    def _prefill_latents(self, query: torch.Tensor, key: torch.Tensor, chunk: _Chunk, output: torch.Tensor) -> None:
        """Attend as `_prefill` where all heads have one key [L, head_dim]: the queries of several heads are the rows of
        one product."""
        value = key[:, : self.heads.values]
        for tile in chunk.tiles:
            pairs = zip(query[tile.rows].split(HEADS, 1), output[tile.rows].split(HEADS, 1), strict=True)
            for heads, target in pairs:
                mask = tile.mask.repeat_interleave(heads.shape[1], 0)
                attended = self._attend(heads.flatten(0, 1), key[tile.keys], value[tile.keys], mask, None)
                target.copy_(attended.view_as(target))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the softmax of the scores times the values. Scores are capped if the heads have a softcap; `mask` is
        added to them, and `sinks` are an additional column."""
        scale, softcap = self.heads.scale, self.heads.softcap
        if softcap is None and sinks is None and query.ndim == 4:
            # On CUDA, faster algorithms read masks from aligned addresses, and a slice of a band may begin anywhere.
            with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else nullcontext():
                return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        scores = (query @ key.transpose(-1, -2)).float().mul_(scale / (softcap or 1.0))
        if softcap is not None:
            scores = scores.tanh_().mul_(softcap)
        if mask is not None:
            scores = scores.add_(mask)
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[-2]]
        return weights.to(value.dtype) @ value

    def _plan_for(self, metadata: AttentionMetadata, dtype: torch.dtype) -> _Plan:
        if self._plan is None or self._plan[0] is not metadata:
            self._plan = metadata, _make_plan(metadata, self.block_size, self.heads.window, dtype)
        return self._plan[1]


@dataclass(frozen=True)
class _DecodeGroup:
    """B requests of similar length with one query each."""

    rows: torch.Tensor  # int64 [B], which tokens of the step
    slots: torch.Tensor  # int64 [B * L], each request's keys; padding repeats its last one, which is finite
    mask: torch.Tensor | None  # [B, 1, 1, L], 0 or -inf; None where nothing is padded


@dataclass(frozen=True)
class _Tile:
    """Some queries of a chunk, and the keys that they see."""

    rows: slice  # range of the step's tokens
    keys: slice  # range of the chunk's slots
    mask: torch.Tensor  # [rows, keys], 0 or -inf


@dataclass(frozen=True)
class _Chunk:
    """The queries of one request."""

    slots: torch.Tensor  # int64 [L], every key that any of them sees
    tiles: list[_Tile]


@dataclass(frozen=True)
class _Plan:
    """The gathers and masks of a step, the same for all its layers."""

    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


def _make_plan(metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype) -> _Plan:
    groups = group_by_length(
        [
            seq_len if window is None else min(seq_len, window)
            for seq_len in metadata.seq_lens_list[: metadata.num_decodes]
        ]
    )
    return _Plan(
        decodes=[_plan_decodes(metadata, group, block_size, window, dtype) for group in groups],
        chunks=list(_plan_chunks(metadata, block_size, window, dtype)),
    )


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group requests by the number of keys they read, so that each group can be padded to its longest request.

    Returns lists of indices that hold every request once. Padding of a group is at most PADDING_SHARE of its keys, or
    at most FREE_PADDING.
    """
    if lengths:  # the usual case, without sorting
        needed = sum(lengths)
        if max(lengths) * len(lengths) - needed <= max(FREE_PADDING, PADDING_SHARE * needed):
            return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    longest = padding = needed = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not groups or padding + longest - length > max(FREE_PADDING, PADDING_SHARE * (needed + length)):
            groups.append([])
            longest, padding, needed = length, 0, 0
        groups[-1].append(index)
        padding += longest - length
        needed += length
    return groups


def _plan_decodes(
    metadata: AttentionMetadata, group: list[int], block_size: int, window: int | None, dtype: torch.dtype
) -> _DecodeGroup:
    device = metadata.block_table.device
    ends = [metadata.seq_lens_list[i] for i in group]
    starts = [0 if window is None else max(0, end - window) for end in ends]
    longest = max(end - start for end, start in zip(ends, starts, strict=True))
    rows = torch.tensor(group, device=device)
    first = torch.tensor(starts, device=device).unsqueeze(1)
    last = torch.tensor(ends, device=device).unsqueeze(1) - 1
    positions = first + torch.arange(longest, device=device)  # [B, L]
    mask = None
    if longest * len(group) > sum(ends) - sum(starts):
        mask = torch.zeros(positions.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(positions > last, float("-inf"))[:, None, None]
    slots = _slots(metadata.block_table.index_select(0, rows), torch.minimum(positions, last), block_size)
    return _DecodeGroup(rows, slots.flatten(), mask)


def _plan_chunks(
    metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype
) -> Iterator[_Chunk]:
    requests = range(metadata.num_decodes, len(metadata.query_lens_list))
    if not requests:
        return
    device = metadata.block_table.device
    reach = max(metadata.seq_lens_list[i] for i in requests)
    if window is not None:
        reach = min(reach, window)
    band = _causal_band(reach, window, dtype, device)
    row = metadata.num_decodes
    for i in requests:
        query_len, seq_len = metadata.query_lens_list[i], metadata.seq_lens_list[i]
        if query_len == 0:
            continue
        computed = seq_len - query_len
        first = 0 if window is None else max(0, computed + 1 - window)
        positions = torch.arange(first, seq_len, device=device).unsqueeze(0)
        slots = _slots(metadata.block_table[i : i + 1], positions, block_size)[0]
        tiles = []
        for start in range(0, query_len, TILE):
            stop = min(start + TILE, query_len)
            oldest = 0 if window is None else max(0, computed + start + 1 - window)
            behind = computed + start - oldest  # tokens before the tile that its first query sees
            mask = band[: stop - start, reach - behind : reach + stop - start]
            keys = slice(oldest - first, computed + stop - first)
            tiles.append(_Tile(slice(row + start, row + stop), keys, mask))
        yield _Chunk(slots, tiles)
        row += query_len


def _causal_band(reach: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a mask to slice for tiles, [TILE, reach + TILE]: row i sees column reach + i, and window - 1 before it.

    A causal mask depends only on the distance from key to query, so the mask of a tile that follows n tokens is the
    slice from column reach - n on. One tensor serves all chunks of a step.
    """
    query = torch.arange(TILE, device=device).unsqueeze(1) + reach
    key = torch.arange(reach + TILE, device=device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _slots(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the cache slots of token positions: int32 [B, max_blocks] and int64 [B, L] -> int64 [B, L]"""
    blocks = block_table.gather(1, positions // block_size).long()
    return blocks * block_size + positions % block_size


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros like torch.zeros, but commit host memory only when it is first written.

    torch.zeros writes all of the memory: seconds for gigabytes of cache, most of which a quiet server never uses.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


# ------------------------------------------------------------------------------------------------------------- metadata


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The cache positions of a step's tokens for layers of one KV group (`gpu.kv_cache`): T tokens of B requests, one
    request after the other.

    The first `num_decodes` requests have exactly one token in this step; the others have more, or none. `seq_lens`
    counts all tokens of a request up to the last one of this step. Entries of `block_table` past a request's length, or
    behind the window of all its queries, are unspecified and must not be read as data.
    """

    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T], block id * block_size + offset
    num_decodes: int
    # The same lengths on the host, so that no backend reads them back from the device. In a graph only the device knows
    # the lengths: these lists are empty and `num_decodes` is 0.
    query_lens_list: list[int]  # [B]
    seq_lens_list: list[int]  # [B]

    @classmethod
    def of_groups(
        cls, *, block_tables: torch.Tensor, slot_mappings: torch.Tensor, **shared: Any
    ) -> list[AttentionMetadata]:
        """Return each KV group's metadata: `block_tables` is [groups, B, max_blocks], `slot_mappings` [groups, T]."""
        tables = zip(block_tables, slot_mappings, strict=True)
        return [cls(block_table=table, slot_mapping=slots, **shared) for table, slots in tables]


# ------------------------------------------------------------------------------------------------------- triton backend
# Paged attention by the kernels of `gpu.kernels` on CUDA, and on a CPU by their torch references.


class TritonAttention:
    """Attention with heads of one kind, by a kernel that rotates and stores the merged projection in one pass.

    A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: see `gpu.kernels.rope`. It does
    not need the metadata's lists on the host, so any step may be captured in a graph. Padding has `slot_mapping` -1 and
    `seq_lens` 0.
    """

    def __init__(self, heads: Heads, block_size: int) -> None:
        self.heads = heads
        self.block_size = block_size
        # The work that a step's layers share, and the lengths it was made from (kept so that their id is not reused).
        self._work: tuple[torch.Tensor, AttentionWork | None] | None = None

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (num_blocks, 2, self.heads.kv, self.block_size, self.heads.dim)
        return torch.zeros(shape, dtype=dtype, device=device)

    def forward_fused(
        self,
        qkv: torch.Tensor,  # [T, num_heads + 2 * num_kv_heads, head_dim], queries first; may be overwritten
        positions: torch.Tensor,  # int64 [T]
        rotary_table: torch.Tensor,  # [2, max_positions, head_dim], cosines and signed sines
        qk_norm: torch.Tensor | None,  # [2, head_dim], RMSNorm weights of query and key heads
        eps: float,  # epsilon of these norms
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
        query_scales: torch.Tensor | None = None,  # float32 [max_positions], factors of the queries
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, then do as `TorchAttention.forward`: [T, num_heads, head_dim]."""
        query = rope_and_cache(
            qkv,
            positions,
            rotary_table,
            kv_cache,
            metadata.slot_mapping,
            num_heads=self.heads.query,
            query_scales=query_scales,
            qk_norm=qk_norm,
            eps=eps,
        )
        where = (metadata.seq_lens, metadata.query_start_loc)
        num_decodes = metadata.num_decodes if metadata.query_lens_list else None
        if self._work is None or self._work[0] is not metadata.seq_lens:  # the first layer of a step
            work = list_attention_work(
                query,
                self.heads.kv,
                *where,
                window=self.heads.window,
                num_decodes=num_decodes,
                longest_chunk=max(metadata.query_lens_list, default=None),
            )
            self._work = metadata.seq_lens, work
        return paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            *where,
            self._work[1],
            scale=self.heads.scale,
            window=self.heads.window,
            softcap=self.heads.softcap,
            sinks=sinks,
            num_decodes=num_decodes,
        )


AttentionBackend = TorchAttention | TritonAttention
