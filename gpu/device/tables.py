"""The requests' rows on the device. Made by the runner; `upload` writes to them, and so do the steps themselves.

All tables lie in one int32 tensor, the buffer, so that whatever changes in them from one step to the next is one list
of (offset, values) and one scatter. A table is a view of it, float32 or int64 where its numbers are.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu.rows import COLUMNS, BatchSizes

# Rows of logits that are penalized together: the kernel wants a word of scratch for each of them and each token.
PENALIZED_TOGETHER = 32

DEVICE_COLUMNS = [column for column in COLUMNS if not column.host_only]


def device_columns(num_rows: int) -> dict[str, torch.Tensor]:
    """The columns as a device has them, [num_rows] each, with nothing but defaults. They are made on the host."""
    return {
        column.name: torch.from_numpy(np.full(num_rows, column.default, dtype=column.device_dtype))
        for column in DEVICE_COLUMNS
    }


class DeviceTables:
    """Rows 0 .. max_num_seqs - 1 are for requests. One more, `padding_row`, stays empty: the padding of a graph points
    to it.
    """

    def __init__(self, sizes: BatchSizes, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = sizes.block_size
        self.padding_row = sizes.max_num_seqs
        self.num_rows = sizes.max_num_seqs + 1
        self._offsets: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._size = 0

        columns = device_columns(self.num_rows)
        # Of the step at hand, as `gpu.rows.StepShape` has them: of each sampled position its row, its place among the
        # tokens and where in its request the token stands that is to be drawn; of each request its row, its first token
        # and its length, which the device computes.
        samples, requests = ("sampling_rows", "logits_indices", "sampled_positions"), ("batch_rows", "query_start_loc")
        words = {name: column.itemsize // 4 for name, column in columns.items()}
        words |= dict.fromkeys(samples, 2) | dict.fromkeys((*requests, "seq_lens"), 1)
        for name in sorted(words, key=lambda name: -words[name]):  # 64-bit words lie at even offsets
            self._place(name, words[name])
        self._place("block_tables", sizes.num_groups * sizes.row_blocks)
        self._place("token_ids", sizes.row_len)
        self.buffer = torch.zeros(self._size, dtype=torch.int32, device=device)

        self.columns = {name: self.view(name, column.dtype).copy_(column) for name, column in columns.items()}
        self.num_tokens = self.columns["num_tokens"]
        self.num_computed_tokens = self.columns["num_computed_tokens"]
        self.block_tables = self.view("block_tables").view(self.num_rows, sizes.num_groups, sizes.row_blocks)
        self.token_ids = self.view("token_ids").view(self.num_rows, sizes.row_len)
        self.batch_rows = self.view("batch_rows").fill_(self.padding_row)
        self.query_start_loc, self.seq_lens = self.view("query_start_loc"), self.view("seq_lens")
        self.sampling_rows, self.logits_indices, self.sampled_positions = (
            self.view(name, torch.int64) for name in samples
        )
        self.one_each = torch.arange(self.num_rows, dtype=torch.int32, device=device)  # starts where everybody decodes
        self.penalty_scratch = torch.zeros((PENALIZED_TOGETHER, vocab_size), dtype=torch.int32, device=device)

    def view(self, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A table as it lies in the buffer, flat."""
        offset = self._offsets[name]
        return self.buffer[offset : offset + self.num_rows * self._widths[name]].view(dtype)

    def offset(self, name: str, row: int = 0, index: int = 0) -> int:
        """Where in the buffer word `index` of this row lies."""
        return self._offsets[name] + row * self._widths[name] + index

    def _place(self, name: str, width: int) -> None:
        self._offsets[name] = self._size
        self._widths[name] = width
        self._size += width * self.num_rows
