"""The input batch: tokens and blocks of the row table's rows, kept on the host, and a step's inputs made from them.

Owned by the model runner and used by its thread alone. The arrays are allocated for the largest batch and the longest
context at once, and since they start as zero pages the operating system commits only the parts that are touched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.rows import BatchSizes, RowTable, StepShape
from gpu.runner import ModelInputs
from gpu.sampling import Penalized


class InputBatch:
    """A `RowStore` on the host. Not thread-safe."""

    def __init__(self, table: RowTable, sizes: BatchSizes) -> None:
        self.block_size = sizes.block_size
        self.penalized = Penalized(table.columns)
        self._num_computed_tokens = table.columns["num_computed_tokens"]
        self._num_prompt_tokens = table.columns["num_prompt_tokens"]
        self.token_ids = np.zeros((sizes.max_num_seqs, sizes.row_len), dtype=np.int32)  # prompt and output
        self.block_tables = np.zeros((sizes.num_groups, sizes.max_num_seqs, sizes.row_blocks), dtype=np.int32)

    def add(self, row: int, request: NewRequestData) -> None:
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.penalized.add(row, request)

    def append_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        num_groups = len(self.block_tables)
        for group, table in enumerate(self.block_tables):
            of_group = block_ids[group::num_groups]
            table[row, start : start + len(of_group)] = of_group

    def remove(self, row: int) -> None:
        self.penalized.remove(row)

    def inputs(self, shape: StepShape) -> ModelInputs:
        """What a step gives the model."""
        # Token t of request i stands at position first_positions[i] + (t - query_start_loc[i]).
        token_rows = np.repeat(shape.rows, shape.query_lens)
        positions = np.arange(shape.query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(self._num_computed_tokens[shape.rows] - shape.query_start_loc[:-1], shape.query_lens)
        num_blocks = -(-int(shape.seq_lens.max()) // self.block_size)
        return ModelInputs(
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            query_start_loc=shape.query_start_loc,
            seq_lens=shape.seq_lens,
            block_tables=np.ascontiguousarray(self.block_tables[:, shape.rows, :num_blocks]),
            num_decodes=shape.num_decodes,
            num_prompt_tokens=self._num_prompt_tokens[shape.rows],
        )

    def append(self, shape: StepShape, token_ids: NDArray[np.int64]) -> None:
        """Record what a step has sampled, int64 [S]."""
        self.record(shape.sampling_rows, shape.positions, token_ids)

    def record(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """These tokens now stand at these positions of their rows."""
        self.token_ids[rows, positions] = token_ids
        self.penalized.append(rows, token_ids)
