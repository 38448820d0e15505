"""A stand-in for a language model whose logits are a function of every token so far, as read back from its KV cache.

A wrong slot, position, block table or length anywhere changes what it says next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from gpu.attention import AttentionMetadata


class HistoryModel:
    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.kv_caches = [torch.full((num_blocks * block_size,), -1)]
        self.num_logit_rows: list[int] = []
        self.steps: list[AttentionMetadata] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        if cancellation_check is not None:
            cancellation_check()
        self.steps.append(metadata)
        slots = kv_caches[0]
        slots[metadata.slot_mapping] = input_ids
        hidden = torch.zeros(len(input_ids), 1, dtype=torch.int64)
        starts = metadata.query_start_loc.tolist()
        for i, (start, end) in enumerate(itertools.pairwise(starts)):
            length = int(metadata.seq_lens[i])
            assert positions[start:end].tolist() == list(range(length - (end - start), length))
            blocks = metadata.block_table[i, : -(-length // self.block_size)].long()
            own_slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:length]
            history = slots[own_slots]
            assert (history >= 0).all(), "attends to a slot that was never written"
            weights = torch.arange(1, length + 1) * 7919
            sums = ((history + 1) * weights).cumsum(0) % 1_000_003
            hidden[start:end, 0] = sums[length - (end - start) :]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logit_rows.append(len(hidden))
        waves = torch.arange(1, self.vocab_size + 1, dtype=torch.float64) * 0.618
        return (torch.sin(hidden.double() * waves) * 4).float()
