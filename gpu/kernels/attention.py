"""Attention over the paged KV cache, in the layout of `gpu.kernels.rope`.

Kernels and reference promise:

1. Only slots of a request's own tokens are read, never one past its length or before the window of all its queries:
   free blocks may hold anything, NaN included. Other entries of `block_table` may be anything and are not used.
2. A request with one query and length 0 (padding of a graph) reads nothing and gets zeros. Rows of `out` that belong to
   no request are not written.
3. A request's result does not depend on the others in the batch, except for the places where its keys are cut.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from gpu.kernels.decode import paged_decode
from gpu.kernels.dispatch import on_triton, tl, triton
from gpu.kernels.prefill import paged_prefill, rows_per_block

# The fewest tokens of a part. Parts get this small only if requests are too few to fill the device; then each further
# tile of a program delays the whole step.
MIN_PART_TOKENS = 64
# Programs wanted per multiprocessor. More than run at once, so that requests of unequal length fill each other's gaps.
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROCESSORS = 4
BLOCK = 512


class AttentionWork(NamedTuple):
    """The work of each program in one step, the same for all layers with heads of one kind. Entries that begin with -1
    are unused."""

    parts: torch.Tensor  # int32 [P, 4], of decodes: request, number of the part, of how many, length of the request
    part_starts: torch.Tensor  # int32 [B + 1]
    blocks: torch.Tensor  # int32 [Q, 2], of chunks: request, and its first query that the program takes
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
    spare = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors(device), num_kv_heads)
    parts = torch.empty((num_requests + spare, 4), dtype=torch.int32, device=device)
    part_starts = torch.empty(num_requests + 1, dtype=torch.int32, device=device)
    blocks = torch.empty((max_blocks, 2), dtype=torch.int32, device=device)
    _list_work[(1,)](
        parts,
        part_starts,
        blocks,
        seq_lens,
        query_start_loc,
        num_requests,
        max_blocks,
        SPARE=spare,
        WINDOW=window or 0,
        BLOCK_Q=block_q,
        MIN_PART_TOKENS=MIN_PART_TOKENS,
        BLOCK=BLOCK,
    )
    return AttentionWork(parts, part_starts, blocks, block_rows)


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


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

    `work` comes from `list_attention_work`: it cuts decodes into parts, which are merged by their log-sum-exp. With
    `num_decodes` 0 no decode kernel is started. A cache of another type than the query is converted as it is read.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if work is None:
        attend_reference(query, kv_cache, block_table, seq_lens, query_start_loc, out, scale, window, softcap, sinks)
        return out
    if num_decodes != 0:
        lists = (work.parts, work.part_starts)
        paged_decode(query, kv_cache, block_table, *lists, out, scale, window, softcap, sinks)
    if len(work.blocks):
        tables = (kv_cache, block_table, seq_lens, query_start_loc)
        paged_prefill(query, *tables, work.blocks, work.block_rows, out, scale, window, softcap, sinks)
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
# bound; each program looks up its work, and programs without work end at once. Besides one part per decode there are
# `spare` parts: a part has 1 / `spare` of all tokens read, so a long request among short ones is split, and short
# requests are not.


# One compilation serves any number of requests: nothing is gained by specializing.
@triton.jit(
    do_not_specialize=["num_requests", "max_blocks"], do_not_specialize_on_alignment=["lengths_ptr", "starts_ptr"]
)
def _list_work(
    parts_ptr,
    part_starts_ptr,
    blocks_ptr,
    lengths_ptr,
    starts_ptr,
    num_requests,
    max_blocks,
    SPARE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MIN_PART_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_requests, BLOCK):
        _, num_queries, length = _request(start, lengths_ptr, starts_ptr, num_requests, BLOCK)
        total += tl.where(num_queries == 1, _visible(length, WINDOW), 0)
    per_part = tl.maximum(tl.cdiv(tl.sum(total), SPARE), MIN_PART_TOKENS).to(tl.int32)

    parts_before = num_requests * 0
    blocks_before = num_requests * 0
    for start in range(0, num_requests, BLOCK):
        request, num_queries, length = _request(start, lengths_ptr, starts_ptr, num_requests, BLOCK)
        inside = request < num_requests
        num_parts = tl.where(num_queries == 1, tl.maximum(tl.cdiv(_visible(length, WINDOW), per_part), 1), 0)
        first = parts_before + tl.cumsum(num_parts, 0) - num_parts
        tl.store(part_starts_ptr + request, first, mask=inside)
        for part in range(tl.max(num_parts)):
            entry = parts_ptr + (first + part) * 4
            mine = part < num_parts
            tl.store(entry, request, mask=mine)
            tl.store(entry + 1, part + request * 0, mask=mine)
            tl.store(entry + 2, num_parts, mask=mine)
            tl.store(entry + 3, length, mask=mine)
        parts_before += tl.sum(num_parts)

        num_blocks = tl.where(num_queries > 1, tl.cdiv(num_queries, BLOCK_Q), 0)
        first = blocks_before + tl.cumsum(num_blocks, 0) - num_blocks
        for block in range(tl.max(num_blocks)):
            entry = blocks_ptr + (first + block) * 2
            mine = block < num_blocks
            tl.store(entry, request, mask=mine)
            tl.store(entry + 1, block * BLOCK_Q + request * 0, mask=mine)
        blocks_before += tl.sum(num_blocks)
    tl.store(part_starts_ptr + num_requests, parts_before)

    for start in range(parts_before, num_requests + SPARE, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(parts_ptr + place * 4, tl.full([BLOCK], -1, tl.int32), mask=place < num_requests + SPARE)
    for start in range(blocks_before, max_blocks, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(blocks_ptr + place * 2, tl.full([BLOCK], -1, tl.int32), mask=place < max_blocks)


@triton.jit
def _request(start, lengths_ptr, starts_ptr, num_requests, BLOCK: tl.constexpr):
    """Return the indices of some requests, and their numbers of queries and of tokens; 0 beyond the last request."""
    request = start + tl.arange(0, BLOCK)
    inside = request < num_requests
    first = tl.load(starts_ptr + request, mask=inside, other=0)
    num_queries = tl.load(starts_ptr + request + 1, mask=inside, other=0) - first
    return request, num_queries, tl.load(lengths_ptr + request, mask=inside, other=0)


@triton.jit
def _visible(length, WINDOW: tl.constexpr):
    return tl.minimum(length, WINDOW) if WINDOW > 0 else length
