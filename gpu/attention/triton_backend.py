"""Paged attention by the kernels of gpu.kernels: what serves on CUDA, and on a CPU through their torch references."""

from __future__ import annotations

import torch

from gpu.attention import AttentionMetadata
from gpu.checkpoint.architecture import Heads
from gpu.kernels import paged_decode, paged_prefill, rope_and_cache, store_kv


class TritonAttention:
    """An `AttentionBackend` and a `FusedAttention`.

    A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: see `gpu.kernels.rope`. Of the
    metadata only tensors and `num_decodes` are used, never the lists of the host: a step of decodes alone may be
    captured in a graph. Its padding has `slot_mapping` -1 and `seq_lens` 0.
    """

    def __init__(self, heads: Heads, block_size: int) -> None:
        self.heads = heads
        self.block_size = block_size

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (num_blocks, 2, self.heads.kv, self.block_size, self.heads.dim)
        return torch.zeros(shape, dtype=dtype, device=device)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        store_kv(key, value, kv_cache, metadata.slot_mapping)
        return self._attend(query, kv_cache, metadata)

    def forward_fused(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_table: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        query = rope_and_cache(
            qkv,
            positions,
            rotary_table,
            kv_cache,
            metadata.slot_mapping,
            num_heads=self.heads.query,
            qk_norm=qk_norm,
            eps=eps,
        )
        return self._attend(query, kv_cache, metadata)

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
        if decodes:
            paged_decode(
                query[:decodes],
                kv_cache,
                metadata.block_table[:decodes],
                metadata.seq_lens[:decodes],
                scale=self.heads.scale,
                window=self.heads.window,
                out=output[:decodes],
            )
        if decodes < requests:
            paged_prefill(
                query,
                kv_cache,
                metadata.block_table[decodes:],
                metadata.seq_lens[decodes:],
                metadata.query_start_loc[decodes:],
                scale=self.heads.scale,
                window=self.heads.window,
                out=output,
            )
        return output
