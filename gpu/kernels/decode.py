"""The decode kernels of `paged_attention`: split-KV attention (flash decoding) over pages, and the merge of the parts.

One program takes all queries that share a KV head (at least 16 rows, the least of a matrix instruction) over one part
of one request's keys, so that every key is read once. The work list assigns the parts. A second kernel merges the parts
of a request that has several, and the parts of the prefill kernel.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from gpu.kernels.dispatch import tl, triton

# Programs wanted per multiprocessor. More than run at once, so that requests of unequal length fill each other's gaps.
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROCESSORS = 4
MERGED_PARTS, MERGED_ROWS = 16, 4  # how many a program of `_merge` reads at once


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    parts: torch.Tensor,
    merged: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write `out` for the requests that `parts` names; request i has query i."""
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group, block_dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))  # 16: see BLOCK_M
    results, lse = empty_parts((len(parts), num_kv_heads, group), out)
    _decode[(len(parts), num_kv_heads)](
        out,
        results,
        lse,
        query,
        kv_cache,
        block_table,
        parts,
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
        GROUP=group,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),  # no fewer fit a matrix instruction
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        TILE=16 if query.dtype == torch.float32 else 64 if block_dim * query.element_size() <= 256 else 32,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        num_warps=4,
        num_stages=3,
    )
    merge(out, results, lse, merged, group)


def empty_parts(shape: tuple[int, int, int], out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty float32 tensors for the partial results of a step, [parts, KV heads, rows, head_dim], and for the
    base-2 logarithms of the sums of their weights, [parts, KV heads, rows]."""
    empty = partial(torch.empty, dtype=torch.float32, device=out.device)
    return empty((*shape, out.shape[2])), empty(shape)


def merge(out: torch.Tensor, results: torch.Tensor, lse: torch.Tensor, merged: torch.Tensor, group: int) -> None:
    """Merge the partial results of the rows that `merged` lists, and write them to `out`. The number of programs
    depends on shapes alone; the programs share the listed work, and one without work ends at once."""
    _, num_kv_heads, rows, head_dim = results.shape
    most = (len(merged) - 1) * num_kv_heads * triton.cdiv(rows, MERGED_ROWS)
    _merge[(min(most, PROGRAMS_PER_PROCESSOR * num_processors(out.device)),)](
        out,
        results,
        lse,
        merged,
        out.stride(0),
        out.stride(1),
        rows,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        ROWS=MERGED_ROWS,
        CHUNK=MERGED_PARTS,
        num_warps=8,
    )


# The table's width is not a constant of the kernel: one compilation serves all widths.
@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    out_ptr,
    partial_ptr,  # float32 [parts, NUM_HEADS, HEAD_DIM]
    lse_ptr,  # float32 [parts, NUM_HEADS], to the base 2
    query_ptr,
    cache_ptr,
    table_ptr,
    parts_ptr,  # int32 [parts, 4]: request or -1, number of the part, of how many, length of the request
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
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    request = tl.load(parts_ptr + place * 4).to(tl.int64)
    if request < 0:
        return
    part = tl.load(parts_ptr + place * 4 + 1)
    num_parts = tl.load(parts_ptr + place * 4 + 2)
    length = tl.load(parts_ptr + place * 4 + 3)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    stop = tl.cdiv(length, TILE)
    start = first // TILE
    per_part = tl.cdiv(stop - start, num_parts)
    start += part * per_part
    stop = tl.minimum(stop, start + per_part)

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
    # Only the first part of a request has the sinks, so that the merged result has them once.
    highest, total = beginning(sinks_ptr + head, member < tl.where(part == 0, GROUP, 0), HAS_SINKS)
    for index in range(start, stop):
        token = index * TILE + tl.arange(0, TILE)
        visible = (token >= first) & (token < length)
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=visible, other=0)
        offset = block.to(tl.int64) * cache_block_stride + (token % BLOCK_SIZE) * HEAD_DIM
        key = tl.load(keys_ptr + offset[None, :] + dim[:, None], mask=visible[None, :] & in_dim[:, None], other=0.0)
        key = key.to(query.dtype)  # from a cache of 8 bits
        value = tl.load(
            keys_ptr + cache_kv_stride + offset[:, None] + dim[None, :],
            mask=visible[:, None] & in_dim[None, :],
            other=0.0,
        ).to(query.dtype)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, softcap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        acc, highest, total = accumulate(acc, highest, total, scores, value)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # no key was seen where the length is 0
    if num_parts > 1:
        target = place * NUM_HEADS + head
        tl.store(partial_ptr + target[:, None] * HEAD_DIM + dim[None, :], result, mask=rows)
        tl.store(lse_ptr + target, highest + tl.log2(tl.where(total > 0, total, 1.0)), mask=member < GROUP)
    else:
        target = request * out_stride + head * out_head_stride
        tl.store(out_ptr + target[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    out_ptr,
    partial_ptr,
    lse_ptr,
    merged_ptr,  # int32 [1 + M, 4]: number of used entries; entries: first part, parts, first query, queries
    out_stride,
    out_head_stride,
    rows,  # of a part
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    per_entry = tl.cdiv(rows, ROWS) * NUM_KV_HEADS
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < HEAD_DIM
    for unit in range(tl.program_id(0), tl.load(merged_ptr) * per_entry, tl.num_programs(0)):
        entry = merged_ptr + (1 + unit // per_entry) * 4
        first = tl.load(entry).to(tl.int64)
        num_parts = tl.load(entry + 1)
        kv_head = unit % NUM_KV_HEADS
        row = unit % per_entry // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
        exists = row < tl.load(entry + 3) * GROUP
        acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, num_parts, CHUNK):
            part = start + tl.arange(0, CHUNK)
            used = (part < num_parts)[:, None] & exists[None, :]
            source = ((first + part) * NUM_KV_HEADS + kv_head)[:, None] * rows + row[None, :]
            lse = tl.load(lse_ptr + source, mask=used, other=float("-inf"))
            values = tl.load(
                partial_ptr + source[:, :, None] * HEAD_DIM + dim[None, None, :],
                mask=used[:, :, None] & in_dim[None, None, :],
                other=0.0,
            )
            raised = tl.maximum(highest, tl.max(lse, 0))
            shift = tl.where(raised == float("-inf"), 0.0, raised)  # -inf: the row sees no key of the parts so far
            weights = tl.exp2(lse - shift[None, :])
            kept = tl.exp2(highest - shift)
            acc = acc * kept[:, None] + tl.sum(values * weights[:, :, None], 0)
            total = total * kept + tl.sum(weights, 0)
            highest = raised
        token = (tl.load(entry + 2) + row // GROUP).to(tl.int64)
        target = token * out_stride + (kv_head * GROUP + row % GROUP) * out_head_stride
        result = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target[:, None] + dim[None, :], result, mask=exists[:, None] & in_dim[None, :])


# ------------------------------------------------------------------------------------------------------- online softmax
# Used by the kernels of decode and prefill: they merge a tile of scores and values into a running softmax, as
# FlashAttention does (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). Powers of two replace
# those of e: scores come scaled by log2(e), and exp2 is one instruction.


@triton.jit
def beginning(sink_ptrs, is_taken, HAS_SINKS: tl.constexpr):
    """Return the initial maximum and sum of weights of M rows, before any key: the sink's where `is_taken`."""
    highest = tl.full(sink_ptrs.shape, float("-inf"), tl.float32)
    total = tl.zeros(sink_ptrs.shape, tl.float32)
    if HAS_SINKS:
        highest = tl.load(sink_ptrs, mask=is_taken, other=float("-inf")) * 1.4426950409  # log2(e)
        total = tl.where(is_taken, 1.0, 0.0)
    return highest, total


@triton.jit
def accumulate(acc, highest, total, scores, value):
    """Merge float32 `scores` [M, TILE], -inf where hidden, and `value` [TILE, D] into the running state of M rows:
    weighted sum [M, D], maximum [M] and sum of weights [M], all float32."""
    raised = tl.maximum(highest, tl.max(scores, 1))
    # The maximum of a row that has seen no key is -inf, which must not be subtracted.
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(highest - shift)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return acc, raised, total


@triton.jit
def capped(scores, softcap):
    """Return scores s as softcap * tanh(s / softcap), both times log2(e): tanh(x) = 1 - 2 / (1 + e^2x)."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * 2.8853900818)))
