"""Rotary positions and the write to the KV cache in one pass over the merged projection.

The KV cache of one layer is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: for each head the tokens
of a block are contiguous, so a block of one head is one run of memory (4 KiB for 16 tokens of 128 bfloat16). A slot is
`block id * block_size + offset`; slot -1 writes nothing. The cache has the type of the activations, or E4M3 of 8 bits,
in which larger numbers become the largest (448); it has no scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton, tl, triton

# Heads of one token per program. Eight heads of 128 are 2 KiB: enough work for four warps, and a single token of a
# decode still spreads over several multiprocessors.
BLOCK_HEADS = 8


def largest_kept(kv_cache: torch.Tensor) -> float | None:
    """Return the largest number of a cache of 8 bits; None for types with the range of activations."""
    return torch.finfo(kv_cache.dtype).max if kv_cache.element_size() == 1 else None


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    query_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize (Qwen3) and rotate queries and keys, and store keys and values at their slots.

    `qkv` is [T, num_heads + 2 * num_kv_heads, head_dim], queries first, then keys, then values; its queries are rotated
    in place and returned as a view, [T, num_heads, head_dim]. Its keys are unspecified afterwards. `positions` and
    `slot_mapping` are int64 [T]. `table` is [2, max_positions, head_dim], the cosines and signed sines of
    `gpu.models.layers.RotaryEmbedding`; pairs are (i, i + head_dim / 2). `qk_norm` is [2, head_dim], the RMSNorm
    weights of query and key heads. With `query_scales`, float32 [max_positions], queries are multiplied by that of
    their position (Ministral 3). All arithmetic is float32, rounded once.
    """
    if not on_triton(qkv):
        where = (qkv, positions, table, kv_cache, slot_mapping)
        more = {"num_heads": num_heads, "qk_norm": qk_norm, "eps": eps, "query_scales": query_scales}
        return rope_and_cache_reference(*where, **more)  # type: ignore[arg-type]
    num_tokens = qkv.shape[0]
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if num_tokens:
        _rope_and_cache[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, BLOCK_HEADS))](
            qkv,
            positions,
            table,
            kv_cache,
            slot_mapping,
            table if qk_norm is None else qk_norm,
            table if query_scales is None else query_scales,
            eps,
            qkv.stride(0),
            qkv.stride(1),
            table.stride(0),
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_cache.stride(2),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            HAS_NORM=qk_norm is not None,
            HAS_SCALES=query_scales is not None,
            LIMIT=largest_kept(kv_cache),
            BLOCK_HEADS=BLOCK_HEADS,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        )
    return qkv[:, :num_heads]


def rope_and_cache_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    query_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    rotated = qkv[:, : num_heads + num_kv_heads].float()
    if qk_norm is not None:
        rotated = F.rms_norm(rotated, (head_dim,), None, eps)
        rotated[:, :num_heads] *= qk_norm[0].float()
        rotated[:, num_heads:] *= qk_norm[1].float()
    cos, sin = table.index_select(1, positions).float().unsqueeze(2).unbind()
    rotated = rotated * cos + rotated.roll(head_dim // 2, dims=-1) * sin
    if query_scales is not None:
        rotated[:, :num_heads] *= query_scales[positions].view(-1, 1, 1)
    used = slot_mapping >= 0
    blocks, offsets = slot_mapping[used] // kv_cache.shape[3], slot_mapping[used] % kv_cache.shape[3]
    for kind, values in enumerate((rotated[used, num_heads:], qkv[used, num_heads + num_kv_heads :])):
        limit = largest_kept(kv_cache)
        kept = values if limit is None else values.clamp(-limit, limit)
        kv_cache[blocks, kind, :, offsets] = kept.to(kv_cache.dtype)
    query = qkv[:, :num_heads]
    query.copy_(rotated[:, :num_heads])
    return query


@triton.jit
def _rope_and_cache(
    qkv_ptr,
    positions_ptr,
    table_ptr,
    cache_ptr,
    slots_ptr,
    norm_ptr,
    scales_ptr,
    eps,
    token_stride,
    head_stride,
    sines_stride,  # from the cosines to the sines
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    source = qkv_ptr + token * token_stride + head[:, None] * head_stride + pair[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    # A value passes through unchanged: norm, cosine and sine are 1, 1 and 0 for it.
    if HAS_NORM:
        weight = norm_ptr + tl.where(is_query, 0, HEAD_DIM)[:, None] + pair[None, :]
        inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        normed = inside & (~is_value)[:, None]
        low *= tl.where(normed, inverse * tl.load(weight, mask=normed, other=1.0).to(tl.float32), 1.0)
        high *= tl.where(normed, inverse * tl.load(weight + HALF, mask=normed, other=1.0).to(tl.float32), 1.0)
    position = tl.load(positions_ptr + token)
    if HAS_SCALES:
        scale = tl.where(is_query, tl.load(scales_ptr + position), 1.0)[:, None]
        low *= scale
        high *= scale
    angle = table_ptr + position * HEAD_DIM + HALF + pair
    cosine = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(angle + sines_stride, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cosine = tl.where(is_value[:, None], 1.0, cosine)
    sine = tl.where(is_value[:, None], 0.0, sine)
    rotated_low = low * cosine - high * sine
    rotated_high = high * cosine + low * sine

    queries = inside & is_query[:, None]
    tl.store(source, rotated_low.to(qkv_ptr.dtype.element_ty), mask=queries)
    tl.store(source + HALF, rotated_high.to(qkv_ptr.dtype.element_ty), mask=queries)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    if LIMIT is not None:  # a NaN stays a NaN
        rotated_low = tl.where(rotated_low > LIMIT, LIMIT, tl.where(rotated_low < -LIMIT, -LIMIT, rotated_low))
        rotated_high = tl.where(rotated_high > LIMIT, LIMIT, tl.where(rotated_high < -LIMIT, -LIMIT, rotated_high))
    stored = inside & (~is_query)[:, None]
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    base = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    row = base + tl.where(is_value, cache_kv_stride, 0) + kv_head * cache_head_stride
    target = cache_ptr + row[:, None] + pair[None, :]
    tl.store(target, rotated_low.to(cache_ptr.dtype.element_ty), mask=stored)
    tl.store(target + HALF, rotated_high.to(cache_ptr.dtype.element_ty), mask=stored)
