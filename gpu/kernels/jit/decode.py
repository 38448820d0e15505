"""Kernels of gpu.kernels.paged_decode: split-KV attention (flash decoding) over pages, and the merge of the splits.

One program takes all queries that share a KV head (at least 16 rows, which is what a matrix instruction wants) over one
part of one request's keys, so that every key is read once. The grid depends on shapes alone. What a program has to do
it derives from the request's length: a short request leaves most of its programs without work, and they end at once.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from gpu.kernels.jit.online import accumulate

# A part is at least this many tokens. Requests are cut so small only where they are too few to fill the device; then
# each tile more that a program takes is waited for by everybody.
MIN_SPLIT_TOKENS = 64
MAX_SPLITS = 64
# Programs wanted per multiprocessor. More than run at once, so that requests of unequal length fill each other's gaps.
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROCESSORS = 4


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    num_splits: int | None,
) -> None:
    num_requests, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    if num_requests == 0:
        return
    block_dim = max(16, triton.next_power_of_2(head_dim))  # no fewer fit a matrix instruction
    tile = 64 if block_dim * query.element_size() <= 256 else 32
    if num_splits is None:
        max_tokens = block_table.shape[1] * block_size if window is None else window
        num_splits = choose_splits(num_requests * num_kv_heads, max_tokens, query.device)
    num_splits = min(num_splits, MAX_SPLITS)
    partial = lse = out
    if num_splits > 1:
        partial = torch.empty((num_requests, num_heads, num_splits, head_dim), dtype=torch.float32, device=out.device)
        lse = torch.empty((num_requests, num_heads, num_splits), dtype=torch.float32, device=out.device)
    sizes = {
        "WINDOW": window or 0,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "TILE": tile,
        "MIN_TILES": triton.cdiv(MIN_SPLIT_TOKENS, tile),
    }
    _decode[(num_requests, num_kv_heads, num_splits)](
        out,
        partial,
        lse,
        query,
        kv_cache,
        block_table,
        seq_lens,
        scale * math.log2(math.e),
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table.stride(0),
        num_splits,
        IS_SPLIT=num_splits > 1,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        **sizes,
        num_warps=4,
        num_stages=3,
    )
    if num_splits > 1:
        _merge[(num_requests, num_heads)](
            out,
            partial,
            lse,
            seq_lens,
            out.stride(0),
            out.stride(1),
            num_splits,
            MAX_SPLITS=MAX_SPLITS,
            NUM_HEADS=num_heads,
            **sizes,
            num_warps=4,
        )


def choose_splits(num_parts: int, max_tokens: int, device: torch.device) -> int:
    """Into how many parts to cut a request. `num_parts` is how many programs there are uncut, `max_tokens` the longest
    that a request can be."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * _num_processors(device), num_parts)
    useful = triton.cdiv(max_tokens, MIN_SPLIT_TOKENS)
    return max(1, min(wanted, useful, MAX_SPLITS))


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _tiles_of(length, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """The first visible token of a request, its first tile, one past its last, and how many tiles a split takes."""
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    start = first // TILE
    stop = tl.cdiv(length, TILE)
    return first, start, stop, tl.maximum(tl.cdiv(stop - start, num_splits), MIN_TILES)


# The number of splits changes with the batch: it is no constant, and one compilation serves all.
@triton.jit(do_not_specialize=["num_splits"])
def _decode(
    out_ptr,
    partial_ptr,  # float32 [B, NUM_HEADS, num_splits, HEAD_DIM]
    lse_ptr,  # float32 [B, NUM_HEADS, num_splits], to the base 2
    query_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    scale,  # times log2(e)
    out_stride,
    out_head_stride,
    query_stride,
    query_head_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    table_stride,
    num_splits,
    IS_SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    first, start, stop, per_split = _tiles_of(length, num_splits, WINDOW, TILE, MIN_TILES)
    start += split * per_split
    stop = tl.minimum(stop, start + per_split)
    if IS_SPLIT:  # noqa: SIM102  (a constant and a value of the device)
        if start >= stop:
            return

    member = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < HEAD_DIM
    rows = (member < GROUP)[:, None] & in_dim[None, :]
    query = tl.load(
        query_ptr + request * query_stride + head[:, None] * query_head_stride + dim[None, :], mask=rows, other=0.0
    )
    keys_ptr = cache_ptr + kv_head * cache_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for index in range(start, stop):
        token = index * TILE + tl.arange(0, TILE)
        visible = (token >= first) & (token < length)
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=visible, other=0)
        offset = block.to(tl.int64) * cache_block_stride + (token % BLOCK_SIZE) * HEAD_DIM
        key = tl.load(keys_ptr + offset[None, :] + dim[:, None], mask=visible[None, :] & in_dim[:, None], other=0.0)
        value = tl.load(
            keys_ptr + cache_kv_stride + offset[:, None] + dim[None, :],
            mask=visible[:, None] & in_dim[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        acc, highest, total = accumulate(acc, highest, total, scores, value)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # nothing was seen where the length is 0
    if IS_SPLIT:
        part = (request * NUM_HEADS + head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], result, mask=rows)
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=member < GROUP)
    else:
        target = out_ptr + request * out_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    out_ptr,
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    out_stride,
    out_head_stride,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    _, start, stop, per_split = _tiles_of(length, num_splits, WINDOW, TILE, MIN_TILES)
    split = tl.arange(0, MAX_SPLITS)
    used = split * per_split < stop - start
    part = (request * NUM_HEADS + head) * num_splits + split
    lse = tl.load(lse_ptr + part, mask=used, other=float("-inf"))
    highest = tl.max(lse)
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < HEAD_DIM
    parts = tl.load(
        partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=used[:, None] & in_dim[None, :], other=0.0
    )
    total = tl.sum(weights)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    target = out_ptr + request * out_stride + head * out_head_stride + dim
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=in_dim)
