"""Attention over the paged KV cache, in the layout of `gpu.kernels.rope`.

Kernels and reference promise:

1. Only slots of a request's own tokens are read, never one past its length or before the window of all its queries:
   free blocks may hold anything, NaN included. Other entries of `block_table` may be anything and are not used.
2. A request with one query and length 0 (padding of a graph) reads nothing and gets zeros. Rows of `out` that belong to
   no request are not written.
3. A request's result does not depend on the others in the batch, except for the places where its keys are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.kernels.decode import PROGRAMS_PER_PROCESSOR, num_processors, paged_decode
from gpu.kernels.dispatch import on_triton, tl, triton
from gpu.kernels.prefill import paged_prefill, rows_per_block

# The fewest tokens of a part. Parts get this small only if requests are too few to fill the device; then each further
# tile of a program delays the whole step.
MIN_PART_TOKENS = 64
# The same for a block of a chunk, which takes longer over a token and writes a larger partial result.
MIN_BLOCK_PART_TOKENS = 512
BLOCK_PROGRAMS_PER_PROCESSOR = 3  # as many as run at once
BLOCK = 512


class AttentionWork(NamedTuple):
    """The work of each program in one step, the same for all layers with heads of one kind. Entries that begin with -1
    are unused."""

    parts: torch.Tensor  # int32 [P, 4], of decodes: request, index of the part, number of parts, request's length
    merged: torch.Tensor  # int32 [1 + M, 4], decodes with several parts: see `_merge`
    # int32 [N + Q, 4], of chunks: request, first query of the block, index of the part, number of parts. The first N
    # entries are parts of blocks that were cut.
    blocks: torch.Tensor
    merged_blocks: torch.Tensor  # int32 [1 + N, 4], blocks with several parts: see `_merge`
    block_rows: int  # rows of a block: its queries times the heads that share a KV head


def list_attention_work(
    query: torch.Tensor,
    num_kv_heads: int,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    window: int | None = None,
    num_decodes: int | None = None,
    longest_chunk: int | None = None,
) -> AttentionWork | None:
    """Return the work of a step for `paged_attention`, which explains the arguments; None where no kernel runs.

    Only shape and dtype of `query` are used. Requests with one query come first. Their number, `num_decodes`, and the
    most queries of any other, `longest_chunk`, may be unknown to the host.
    """
    if not on_triton(query):
        return None
    num_tokens, num_heads, _ = query.shape
    num_chunks = len(seq_lens) - (num_decodes or 0)
    group = num_heads // num_kv_heads
    block_rows = rows_per_block(query, group, longest_chunk)
    block_q = block_rows // group
    # A chunk has two queries or more, and one block that is not full.
    max_blocks = num_tokens // block_q + min(num_chunks, num_tokens // 2) if num_chunks else 0
    num_requests, device = len(seq_lens), seq_lens.device
    spare, block_spare = (
        triton.cdiv(programs * num_processors(device), num_kv_heads)
        for programs in (PROGRAMS_PER_PROCESSOR, BLOCK_PROGRAMS_PER_PROCESSOR)
    )
    block_parts = block_spare * 4 // 3 if max_blocks else 0
    sizes = (num_requests + spare, 1 + min(num_requests, spare), block_parts + max_blocks, 1 + block_parts)
    lists = torch.empty((sum(sizes), 4), dtype=torch.int32, device=device).split(sizes)
    work = AttentionWork(lists[0], lists[1], lists[2], lists[3], block_rows)
    _list_work[(1,)](
        *lists,
        seq_lens,
        query_start_loc,
        num_requests,
        max_blocks,
        block_parts,
        SPARE=spare,
        BLOCK_SPARE=block_spare,
        WINDOW=window or 0,
        BLOCK_Q=block_q,
        MIN_PART_TOKENS=MIN_PART_TOKENS,
        MIN_BLOCK_PART_TOKENS=MIN_BLOCK_PART_TOKENS,
        BLOCK=BLOCK,
    )
    return work


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    work: AttentionWork | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from the last tokens of each of B requests to all tokens up to them, cached or of this step.

    `query` is [T, num_heads, head_dim]; rows `query_start_loc[i]` to `query_start_loc[i + 1]` (int32 [B + 1]) belong to
    request i, and requests with one query, the decodes, come first. `block_table` is int32 [B, max_blocks], `seq_lens`
    int32 [B], all tokens of a request; `out` has the query's shape and dtype. A query sees `window` tokens, itself
    included; `softcap` changes a score to softcap * tanh(score / softcap). `sinks`, float32 [num_heads], are further
    scores without a value. A chunk of a prompt and a prompt after a cached prefix both have fewer queries than keys.

    `list_attention_work` makes `work` and cuts keys into parts, which are merged by their log-sum-exp. With
    `num_decodes` 0 no decode kernel is started. A cache of another type than the query is converted as it is read.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if work is None:
        attend_reference(query, kv_cache, block_table, seq_lens, query_start_loc, out, scale, window, softcap, sinks)
        return out
    if num_decodes != 0:
        lists = (work.parts, work.merged)
        paged_decode(query, kv_cache, block_table, *lists, out, scale, window, softcap, sinks)
    if len(work.blocks):
        tables = (kv_cache, block_table, seq_lens, query_start_loc)
        blocks, merged = (work.blocks, work.block_rows), work.merged_blocks
        paged_prefill(query, *tables, *blocks, out, scale, window, softcap, sinks, merged=merged)
    return out


def attend_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`paged_attention` in torch, request by request: scores, mask, softmax, in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    block_size = kv_cache.shape[3]
    group_size = query.shape[1] // kv_cache.shape[2]
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if length == 0:
            out[rows] = 0
            continue
        num_queries = int(starts[i + 1] - starts[i])
        behind = (
            0 if window is None else max(0, length - num_queries + 1 - window) // block_size
        )  # blocks that no query sees
        blocks = block_table[i, behind : -(-length // block_size)].long()
        seen_from = behind * block_size
        kv = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - seen_from].to(precise)
        key, value = kv.repeat_interleave(group_size, dim=1)  # each [num_heads, length, head_dim]
        scores = query[rows].to(precise).transpose(0, 1) @ key.transpose(1, 2) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        last = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1)
        position = torch.arange(seen_from, length, device=query.device)
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(precise).view(-1, 1, 1).expand(-1, num_queries, 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[1]]
        out[rows] = (weights @ value).transpose(0, 1).to(out.dtype)


# ------------------------------------------------------------------------------------------------------------ work list
# The device assigns the work of a step's attention to programs.
#
# A grid depends on shapes alone, so that it fits a graph, but the work depends on the lengths. So the grid is an upper
# bound: each program looks up its work, and programs without work end at once. A share is the number of tokens that all
# decodes read, divided by `spare`. A decode is cut into as many parts as it reads shares, rounded. So a long request
# among short ones is cut, and requests of about one share are not. The grid has one part per decode, and `spare` more.
#
# Blocks of chunks are cut by the same rule. Rounding turns 1.5 shares into 2 parts, a third more, which is the worst
# case, so the lists have room for 4/3 of the shares. Blocks that are not cut follow after the parts.


# One compilation serves any number of requests: nothing is gained by specializing.
@triton.jit(
    do_not_specialize=["num_requests", "max_blocks", "block_parts"],
    do_not_specialize_on_alignment=["lengths_ptr", "starts_ptr"],
)
def _list_work(
    parts_ptr,
    merged_ptr,
    blocks_ptr,
    merged_blocks_ptr,
    lengths_ptr,
    starts_ptr,
    num_requests,
    max_blocks,
    block_parts,
    SPARE: tl.constexpr,
    BLOCK_SPARE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MIN_PART_TOKENS: tl.constexpr,
    MIN_BLOCK_PART_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    read_by_decodes = tl.zeros([BLOCK], tl.int64)
    read_by_blocks = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_requests, BLOCK):
        _, _, num_queries, tokens, num_blocks, _ = _requests(
            start, lengths_ptr, starts_ptr, num_requests, WINDOW, BLOCK_Q, BLOCK
        )
        read_by_decodes += tl.where(num_queries == 1, tokens, 0)
        read_by_blocks += tokens.to(tl.int64) * num_blocks
    share = tl.maximum(tl.cdiv(tl.sum(read_by_decodes), SPARE), MIN_PART_TOKENS).to(tl.int32)
    block_share = tl.maximum(tl.cdiv(tl.sum(read_by_blocks), BLOCK_SPARE), MIN_BLOCK_PART_TOKENS).to(tl.int32)

    parts_before = num_requests * 0
    merged_before = num_requests * 0 + 1
    block_parts_before = num_requests * 0
    merged_blocks_before = num_requests * 0 + 1
    blocks_before = block_parts
    for start in range(0, num_requests, BLOCK):
        request, first_query, num_queries, tokens, num_blocks, length = _requests(
            start, lengths_ptr, starts_ptr, num_requests, WINDOW, BLOCK_Q, BLOCK
        )
        num_parts = tl.where(num_queries == 1, tl.maximum((tokens + share // 2) // share, 1), 0)
        first = _places(num_parts, parts_before)
        for part in range(tl.max(num_parts)):
            _store(parts_ptr, first + part, request, part, num_parts, length, part < num_parts)
        is_cut = (num_parts > 1).to(tl.int32)
        _store(merged_ptr, _places(is_cut, merged_before), first, num_parts, first_query, 1, is_cut > 0)
        parts_before += tl.sum(num_parts)
        merged_before += tl.sum(is_cut)

        num_parts = tl.maximum((tokens + block_share // 2) // block_share, 1)
        cut_blocks = tl.where(num_parts > 1, num_blocks, 0)
        first = _places(cut_blocks * num_parts, block_parts_before)
        for i in range(tl.max(cut_blocks * num_parts)):
            mine = i < cut_blocks * num_parts
            _store(blocks_ptr, first + i, request, i // num_parts * BLOCK_Q, i % num_parts, num_parts, mine)
        entry = _places(cut_blocks, merged_blocks_before)
        for block in range(tl.max(cut_blocks)):
            start_of_block, mine = block * BLOCK_Q, block < cut_blocks
            taken = tl.minimum(num_queries - start_of_block, BLOCK_Q)
            where = first_query + start_of_block
            _store(merged_blocks_ptr, entry + block, first + block * num_parts, num_parts, where, taken, mine)
        block_parts_before += tl.sum(cut_blocks * num_parts)
        merged_blocks_before += tl.sum(cut_blocks)

        num_blocks -= cut_blocks
        first = _places(num_blocks, blocks_before)
        for block in range(tl.max(num_blocks)):
            _store(blocks_ptr, first + block, request, block * BLOCK_Q, 0, 1, block < num_blocks)
        blocks_before += tl.sum(num_blocks)

    tl.store(merged_ptr, merged_before - 1)
    tl.store(merged_blocks_ptr, merged_blocks_before - 1)
    _end(parts_ptr, parts_before, num_requests + SPARE, BLOCK)
    _end(blocks_ptr, block_parts_before, block_parts, BLOCK)
    _end(blocks_ptr, blocks_before, block_parts + max_blocks, BLOCK)


@triton.jit
def _requests(
    start, lengths_ptr, starts_ptr, num_requests, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr
):
    """Return six values of `BLOCK` requests from `start` on: index, first query, number of queries, tokens that a query
    sees on average, number of blocks (0 for a decode), and length in tokens. Beyond the last request, counts are 0."""
    request = start + tl.arange(0, BLOCK)
    inside = request < num_requests
    first = tl.load(starts_ptr + request, mask=inside, other=0)
    num_queries = tl.load(starts_ptr + request + 1, mask=inside, other=0) - first
    length = tl.load(lengths_ptr + request, mask=inside, other=0)
    seen = length - num_queries // 2
    seen = tl.minimum(seen, WINDOW) if WINDOW > 0 else seen
    return request, first, num_queries, seen, tl.where(num_queries > 1, tl.cdiv(num_queries, BLOCK_Q), 0), length


@triton.jit
def _places(counts, before):
    """Return the index of each request's first entry in a list: `counts` are entries per request, after `before`."""
    return before + tl.cumsum(counts, 0) - counts


@triton.jit
def _store(list_ptr, place, first, second, third, fourth, mask):
    entry = list_ptr + place * 4
    tl.store(entry, first, mask=mask)
    tl.store(entry + 1, second + place * 0, mask=mask)
    tl.store(entry + 2, third + place * 0, mask=mask)
    tl.store(entry + 3, fourth + place * 0, mask=mask)


@triton.jit
def _end(list_ptr, begin, end, BLOCK: tl.constexpr):
    """Mark the entries from `begin` to `end` as unused."""
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(list_ptr + place * 4, tl.full([BLOCK], -1, tl.int32), mask=place < end)
