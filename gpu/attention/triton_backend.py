"""Paged attention by the kernels of gpu.kernels: what serves on CUDA, and on a CPU through their torch references."""

from __future__ import annotations

import torch

from gpu.attention import AttentionMetadata
from gpu.kernels import paged_decode, paged_prefill, rope_and_cache, store_kv


class TritonAttention:
    """An `AttentionBackend` and a `FusedAttention`.

    One layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: see `gpu.kernels.rope`.
    `sliding_window` is how many tokens a query sees, itself included; None is all. `scale` multiplies the scores,
    1 / sqrt(head_dim) by default. Of the metadata only tensors and `num_decodes` are used, never the lists of the
    host: a step of decodes alone may be captured in a graph. Its padding has `slot_mapping` -1 and `seq_lens` 0.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        sliding_window: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.scale = head_dim**-0.5 if scale is None else scale

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]

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
            num_heads=self.num_heads,
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
                scale=self.scale,
                window=self.sliding_window,
                out=output[:decodes],
            )
        if decodes < requests:
            paged_prefill(
                query,
                kv_cache,
                metadata.block_table[decodes:],
                metadata.seq_lens[decodes:],
                metadata.query_start_loc[decodes:],
                scale=self.scale,
                window=self.sliding_window,
                out=output,
            )
        return output
