"""The prefill kernel of `paged_attention`: causal attention of many queries per request over pages. That of encoders,
which is not causal, uses it, too.

A program takes a block of consecutive queries of one request, which the work list assigns, with all heads that share a
KV head as further rows, so that a tile of keys is read once for the group. Tiles that no row may see are skipped, and
only those at the edges (the diagonal, the end of the window) are masked. If blocks are too few to fill the device, the
work list cuts their keys into parts, and the kernel that merges the parts of decodes merges these, too.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from gpu.kernels.decode import accumulate, beginning, capped, empty_parts, merge
from gpu.kernels.dispatch import tl, triton

FROM_SHARED_MEMORY = (9, 10)  # compute capabilities with matrix instructions that read operands from shared memory


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a card, such as (9, 0), which is also the interpreter's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def rows_per_block(query: torch.Tensor, group: int, longest: int | None) -> int:
    """Return how many rows a program takes: few where no chunk has more (`longest`, in tokens), else as many as
    registers allow. float32 has no exact matrix instructions, and keeps its operands in registers."""
    row_bytes = max(16, triton.next_power_of_2(query.shape[2])) * query.element_size()
    least = max(16, triton.next_power_of_2(group))
    if longest is not None and longest * group <= least:
        return least
    is_narrow = row_bytes > 256 or capability_of(query.device)[0] in FROM_SHARED_MEMORY
    return max(least, 32 if query.dtype == torch.float32 else 64 if is_narrow else 128)


def tile_warps_stages(query: torch.Tensor, block_m: int, converts: bool = False) -> tuple[int, int, int]:
    """Return how many keys a program reads at a time, its number of warps, and how many reads it starts ahead, so that
    no register is spilled (`tests/gpu/test_kernels_compile.py` checks it). On Hopper these were the fastest of 36 for
    chunks of 1,024 tokens (docs/benchmarks/gpu.md). Other cards than Hopper and data-center Blackwell keep the operands
    of matrix instructions in registers, and have room for fewer keys; `converts`: fewer still, since the cache has
    another type than the query.
    """
    row_bytes = max(16, triton.next_power_of_2(query.shape[2])) * query.element_size()
    stages = 3 if row_bytes <= 256 else 2
    if query.dtype == torch.float32:
        return 16, 8, stages
    if block_m < 64:
        return 64 if row_bytes <= 256 else 32, 4, stages
    if capability_of(query.device)[0] in FROM_SHARED_MEMORY:
        return 32, 8 if row_bytes > 256 and capability_of(query.device)[0] > 9 else 4, 2
    return 16 if row_bytes > 256 and converts else 32, 8, stages


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    blocks: torch.Tensor,
    block_m: int,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    ahead: int = 0,
    merged: torch.Tensor | None = None,
) -> None:
    """Write `out` for the requests that `blocks` names; `block_m` is `rows_per_block`. A query sees as many as `ahead`
    tokens after its own; without a window all, and `ahead` must be more than there are. `merged` lists the blocks
    with several parts; the first `len(merged) - 1` entries of `blocks` are kept for parts."""
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))  # no fewer fit a matrix instruction
    tile, num_warps, num_stages = tile_warps_stages(query, block_m, kv_cache.dtype != query.dtype)
    num_parts = 0 if merged is None else len(merged) - 1
    partial, lse = empty_parts((num_parts, num_kv_heads, block_m), out)
    _prefill[(len(blocks), num_kv_heads)](
        out,
        partial,
        lse,
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        blocks,
        scale * math.log2(math.e),
        (softcap or 0.0) * math.log2(math.e),
        query if sinks is None else sinks,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table.stride(0),
        WINDOW=window or 0,
        AHEAD=ahead,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_Q=block_m // group,
        BLOCK_M=block_m,
        BLOCK_DIM=block_dim,
        TILE=tile,
        NUM_PARTS=num_parts,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if merged is not None:
        merge(out, partial, lse, merged, group)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["lengths_ptr", "starts_ptr"])
def _prefill(
    out_ptr,
    partial_ptr,  # float32 [NUM_PARTS, KV heads, BLOCK_M, HEAD_DIM]
    lse_ptr,  # float32 [NUM_PARTS, KV heads, BLOCK_M], to the base 2
    query_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    blocks_ptr,  # int32 [blocks, 4]: request or -1, first query within the request, part, number of parts
    scale,  # times log2(e)
    softcap,  # likewise
    sinks_ptr,  # float32 [heads]
    out_stride,
    out_head_stride,
    query_stride,
    query_head_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    table_stride,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    # Parts start first, then whole blocks, last ones first: late blocks have the most keys, and long work starts early.
    block = tl.program_id(0)
    block = tl.where(block < NUM_PARTS, block, tl.num_programs(0) - 1 - block + NUM_PARTS)
    kv_head = tl.program_id(1)
    request = tl.load(blocks_ptr + block * 4)
    if request < 0:
        return
    first_query = tl.load(blocks_ptr + block * 4 + 1)
    part = tl.load(blocks_ptr + block * 4 + 2)
    num_parts = tl.load(blocks_ptr + block * 4 + 3)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lengths_ptr + request)

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    position = length - num_queries + query_index
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < HEAD_DIM
    # BLOCK_M need not be a multiple of the group; the rows left over are unused.
    rows = ((query_index < num_queries) & (row < BLOCK_Q * GROUP))[:, None] & in_dim[None, :]
    token = (start + query_index).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=rows,
        other=0.0,
    )

    # Tiles from `seen_from` on are seen by some row, from `full_from` on by every row; likewise at the other end.
    first_position = length - num_queries + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, length) - 1
    seen_to = tl.cdiv(tl.minimum(last_position + 1 + AHEAD, length), TILE)
    full_to = tl.minimum(first_position + 1 + AHEAD, length) // TILE
    seen_from = first_position * 0
    full_from = seen_from
    if WINDOW > 0:
        seen_from = tl.maximum(first_position + 1 - WINDOW, 0) // TILE
        full_from = tl.minimum(tl.cdiv(tl.maximum(last_position + 1 - WINDOW, 0), TILE), seen_to)
    full_to = tl.maximum(full_to, full_from)
    if NUM_PARTS > 0:
        num_tiles = seen_to - seen_from
        seen_to = seen_from + num_tiles * (part + 1) // num_parts
        seen_from += num_tiles * part // num_parts
        full_from = tl.minimum(tl.maximum(full_from, seen_from), seen_to)
        full_to = tl.minimum(tl.maximum(full_to, seen_from), seen_to)

    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    highest, total = beginning(sinks_ptr + head, row >= tl.where(part == 0, 0, BLOCK_M), HAS_SINKS)
    keys_ptr = cache_ptr + kv_head * cache_head_stride
    values_ptr = keys_ptr + cache_kv_stride
    blocks_ptr = table_ptr + request.to(tl.int64) * table_stride
    for stretch in tl.static_range(3):
        if stretch == 0:
            begin, end = seen_from, full_from
        elif stretch == 1:
            begin, end = full_from, full_to
        else:
            begin, end = full_to, seen_to
        if stretch != 0 or WINDOW > 0:
            for index in range(begin, end):
                key_position = index * TILE + tl.arange(0, TILE)
                if stretch == 1:
                    loaded = in_dim[None, :]
                    block_id = tl.load(blocks_ptr + key_position // BLOCK_SIZE)
                else:
                    exists = key_position < length
                    if WINDOW > 0:  # blocks before the first query's window may belong to other requests
                        exists &= key_position > first_position - WINDOW
                    loaded = exists[:, None] & in_dim[None, :]
                    block_id = tl.load(blocks_ptr + key_position // BLOCK_SIZE, mask=exists, other=0)
                offset = block_id.to(tl.int64) * cache_block_stride + (key_position % BLOCK_SIZE) * HEAD_DIM
                key = tl.load(keys_ptr + offset[:, None] + dim[None, :], mask=loaded, other=0.0).to(query.dtype)
                value = tl.load(values_ptr + offset[:, None] + dim[None, :], mask=loaded, other=0.0).to(query.dtype)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
                if HAS_CAP:
                    scores = capped(scores, softcap)
                if stretch != 1:
                    visible = key_position[None, :] <= position[:, None] + AHEAD
                    if AHEAD > 0:  # without a window every token of the prompt is seen
                        visible = visible & exists[None, :] if WINDOW > 0 else exists[None, :]
                    if WINDOW > 0:
                        visible &= key_position[None, :] > position[:, None] - WINDOW
                    scores = tl.where(visible, scores, float("-inf"))
                acc, highest, total = accumulate(acc, highest, total, scores, value)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if block < NUM_PARTS:
        place = (block * tl.num_programs(1) + kv_head) * BLOCK_M + row
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], result, mask=rows)
        tl.store(lse_ptr + place, highest + tl.log2(tl.where(total > 0, total, 1.0)))
    else:
        target = out_ptr + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=rows)
