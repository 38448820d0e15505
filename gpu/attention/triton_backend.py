"""Paged attention by the kernels of gpu.kernels: what serves on CUDA, and on a CPU through their torch references."""

from __future__ import annotations

import torch

from gpu.attention import AttentionMetadata
from gpu.checkpoint.architecture import Heads
from gpu.kernels import AttentionWork, list_attention_work, paged_attention, rope_and_cache


class TritonAttention:
    """A `FusedAttention`.

    A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: see `gpu.kernels.rope`. Of the
    metadata the host's lists are not needed: any step may be captured in a graph. Its padding has `slot_mapping` -1 and
    `seq_lens` 0.
    """

    def __init__(self, heads: Heads, block_size: int) -> None:
        self.heads = heads
        self.block_size = block_size
        # What all layers of one step share, and the lengths it was made from (held, so that their id stays their own).
        self._work: tuple[torch.Tensor, AttentionWork | None] | None = None

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (num_blocks, 2, self.heads.kv, self.block_size, self.heads.dim)
        return torch.zeros(shape, dtype=dtype, device=device)

    def forward_fused(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_table: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
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
        where = (metadata.seq_lens, metadata.query_start_loc)
        num_decodes = metadata.num_decodes if metadata.query_lens_list else None
        if self._work is None or self._work[0] is not metadata.seq_lens:  # the first layer of a step
            work = list_attention_work(
                query,
                self.heads.kv,
                *where,
                window=self.heads.window,
                num_decodes=num_decodes,
                longest_chunk=max(metadata.query_lens_list, default=None),
            )
            self._work = metadata.seq_lens, work
        return paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            *where,
            self._work[1],
            scale=self.heads.scale,
            window=self.heads.window,
            softcap=self.heads.softcap,
            sinks=sinks,
            num_decodes=num_decodes,
        )
