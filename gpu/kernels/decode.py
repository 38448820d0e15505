"""The decode kernels of `paged_attention`: split-KV attention (flash decoding) over pages, and the merge of the parts.

One program takes all queries that share a KV head (at least 16 rows, the least of a matrix instruction) over one part
of one request's keys, so that every key is read once. The work list assigns the parts; a second kernel merges those of
requests with several.
"""

from __future__ import annotations

import math

import torch

from gpu.kernels.dispatch import tl, triton

MERGED_TOGETHER = 16


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    parts: torch.Tensor,
    part_starts: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write `out` for the requests that `parts` names; request i has query i."""
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_requests, num_parts = len(block_table), len(parts)
    block_dim = max(16, triton.next_power_of_2(head_dim))  # no fewer fit a matrix instruction
    partial = torch.empty((num_parts, num_heads, head_dim), dtype=torch.float32, device=out.device)
    lse = torch.empty((num_parts, num_heads), dtype=torch.float32, device=out.device)
    sizes = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_DIM": block_dim}
    _decode[(num_parts, num_kv_heads)](
        out,
        partial,
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
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        TILE=16 if query.dtype == torch.float32 else 64 if block_dim * query.element_size() <= 256 else 32,
        **sizes,
        num_warps=4,
        num_stages=3,
    )
    _merge[(num_requests, num_heads)](
        out,
        partial,
        lse,
        part_starts,
        out.stride(0),
        out.stride(1),
        **sizes,
        CHUNK=MERGED_TOGETHER,
        num_warps=4,
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


@triton.jit
def _merge(
    out_ptr,
    partial_ptr,
    lse_ptr,
    part_starts_ptr,
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(part_starts_ptr + request)
    end = tl.load(part_starts_ptr + request + 1)
    if end - begin < 2:
        return
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < HEAD_DIM
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    highest = float("-inf")
    total = 0.0
    for start in range(begin, end, CHUNK):
        part = start + tl.arange(0, CHUNK)
        used = part < end
        source = part.to(tl.int64) * NUM_HEADS + head
        lse = tl.load(lse_ptr + source, mask=used, other=float("-inf"))
        values = tl.load(
            partial_ptr + source[:, None] * HEAD_DIM + dim[None, :], mask=used[:, None] & in_dim[None, :], other=0.0
        )
        raised = tl.maximum(highest, tl.max(lse))  # a number: the first part of a request is never empty
        weights = tl.exp2(lse - raised)
        kept = tl.exp2(highest - raised)
        acc = acc * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(weights)
        highest = raised
    target = out_ptr + request * out_stride + head * out_head_stride + dim
    tl.store(target, (acc / total).to(out_ptr.dtype.element_ty), mask=in_dim)


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
