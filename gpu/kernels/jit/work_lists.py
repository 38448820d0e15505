"""Kernel of gpu.kernels.list_attention_work: which program of a step's attention does what, decided on the device.

A grid depends on shapes alone, so that it fits a graph, but how much there is to read is in the lengths. So the grid
is an upper bound, each program looks up what it has to do, and those for whom there is nothing end at once. Decodes
share `spare` parts beyond one for each of them: a part is the `spare`-th of all tokens that are read, so a long request
among short ones is cut, and as many short ones are not.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

# A part is at least this many tokens. Requests are cut so small only where they are too few to fill the device; then
# each tile more that a program takes is waited for by everybody.
MIN_PART_TOKENS = 64
# Programs wanted per multiprocessor. More than run at once, so that requests of unequal length fill each other's gaps.
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROCESSORS = 4
BLOCK = 512


def list_work(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_kv_heads: int,
    window: int | None,
    max_blocks: int,
    block_q: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of B requests: `parts`, int32 [.., 4], `part_starts`, int32 [B + 1], and `blocks`, int32 [max_blocks, 2], as
    `gpu.kernels.attention.AttentionWork` has them."""
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
    return parts, part_starts, blocks


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


# Nothing is gained by compiling anew for each number of requests.
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
    """The numbers of some requests, how many queries they have, and how many tokens; 0 beyond the last."""
    request = start + tl.arange(0, BLOCK)
    inside = request < num_requests
    first = tl.load(starts_ptr + request, mask=inside, other=0)
    num_queries = tl.load(starts_ptr + request + 1, mask=inside, other=0) - first
    return request, num_queries, tl.load(lengths_ptr + request, mask=inside, other=0)


@triton.jit
def _visible(length, WINDOW: tl.constexpr):
    return tl.minimum(length, WINDOW) if WINDOW > 0 else length
