"""A stand-in for a language model whose logits are a function of every token so far, as read back from its KV cache.

A wrong slot, position, block table or length anywhere changes what it says next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpu.runner.runner import ModelInputs
from gpu.sampling.draw import largest
from tests.gpu.sampling_helpers import fastest_draw


class HistoryModel:
    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.slots = np.full(num_blocks * block_size, -1)
        self.num_logit_rows: list[int] = []
        self.steps: list[ModelInputs] = []
        self.draw = fastest_draw()

    def forward(self, inputs: ModelInputs, cancellation_check: Callable[[], None] | None = None) -> NDArray[np.float32]:
        if cancellation_check is not None:
            cancellation_check()
        self.steps.append(inputs)
        hidden = np.zeros((len(inputs.input_ids), 1), dtype=np.float32)
        for i, (start, end) in enumerate(itertools.pairwise(inputs.query_start_loc.tolist())):
            length = int(inputs.seq_lens[i])
            assert inputs.positions[start:end].tolist() == list(range(length - (end - start), length))
            blocks = inputs.block_tables[0, i, : -(-length // self.block_size)].astype(np.int64)
            own_slots = (blocks[:, None] * self.block_size + np.arange(self.block_size)).flatten()[:length]
            self.slots[own_slots[length - (end - start) :]] = inputs.input_ids[start:end]
            history = self.slots[own_slots]
            assert (history >= 0).all(), "attends to a slot that was never written"
            sums = ((history + 1) * np.arange(1, length + 1) * 7919).cumsum() % 1_000_003
            hidden[start:end, 0] = sums[length - (end - start) :]  # below 2^24: float32 has them exactly
        return hidden

    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        self.num_logit_rows.append(len(hidden))
        waves = np.arange(1, self.vocab_size + 1, dtype=np.float64) * 0.618
        return (np.sin(hidden.astype(np.float64) * waves) * 4).astype(np.float32)

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return largest(self.compute_logits(hidden))
