"""From the merged projection to rotated queries and a written cache, in one pass.

The KV cache of one layer is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: the tokens of a block lie
one after the other for each head, so that a block of one head is one run of memory (4 KiB for 16 tokens of 128
bfloat16). A slot is `block id * block_size + offset`; slot -1 writes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.kernels.dispatch import on_triton


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
) -> torch.Tensor:
    """Normalize (Qwen3) and rotate queries and keys, and store keys and values at their slots.

    `qkv` is [T, num_heads + 2 * num_kv_heads, head_dim], queries first, then keys, then values; its queries are
    rotated in place and returned as a view, [T, num_heads, head_dim]. What stands in its keys afterwards is
    unspecified. `positions` and `slot_mapping` are int64 [T]. `table` is [2, max_positions, head_dim], the cosines and
    signed sines of `gpu.models.layers.RotaryEmbedding`; pairs are (i, i + head_dim / 2). `qk_norm` is [2, head_dim],
    the RMSNorm weights of query and key heads. All arithmetic is float32, rounded once.
    """
    if on_triton(qkv):
        from gpu.kernels.jit import rope

        return rope.rope_and_cache(
            qkv, positions, table, kv_cache, slot_mapping, num_heads=num_heads, qk_norm=qk_norm, eps=eps
        )
    return rope_and_cache_reference(
        qkv, positions, table, kv_cache, slot_mapping, num_heads=num_heads, qk_norm=qk_norm, eps=eps
    )


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
) -> torch.Tensor:
    """`rope_and_cache` in torch."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    rotated = qkv[:, : num_heads + num_kv_heads].float()
    if qk_norm is not None:
        rotated = F.rms_norm(rotated, (head_dim,), None, eps)
        rotated[:, :num_heads] *= qk_norm[0].float()
        rotated[:, num_heads:] *= qk_norm[1].float()
    cos, sin = table.index_select(1, positions).float().unsqueeze(2).unbind()
    rotated = rotated * cos + rotated.roll(head_dim // 2, dims=-1) * sin
    used = slot_mapping >= 0
    blocks, offsets = slot_mapping[used] // kv_cache.shape[3], slot_mapping[used] % kv_cache.shape[3]
    kv_cache[blocks, 0, :, offsets] = rotated[used, num_heads:].to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = qkv[used, num_heads + num_kv_heads :]
    query = qkv[:, :num_heads]
    query.copy_(rotated[:, :num_heads])
    return query
