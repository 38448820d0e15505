"""The requests' rows on the device, and their updates.

All tables lie in one int32 tensor, the buffer, so that whatever changes in them from one step to the next is one list
of (offset, values) and one scatter. A table is a view of it, float32 or int64 where its numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plan import NewRequestData
from gpu.kernels import scatter_words
from gpu.runner.rows import COLUMNS, BatchSizes, RowTable, StepShape

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
        # Of the step at hand, as `gpu.runner.rows.StepShape` has them: of each sampled position its row, its place
        # among the tokens and where in its request the token stands that is to be drawn; of each request its row, its
        # first token and its length, which the device computes.
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


# ----------------------------------------------------------------------------------------------------------------- rows
# What of the row table the device must know, and how it gets there. Used by the runner.
#
# Tokens and block tables are sent and forgotten; of the columns the host keeps its own.


class DeviceRows:
    """A `gpu.runner.rows.RowStore` that writes to `upload`. Not thread-safe."""

    def __init__(self, table: RowTable, tables: DeviceTables, upload: Upload) -> None:
        self._columns = table.columns
        self._tables = tables
        self._upload = upload
        self._sent_rows = np.empty(0, dtype=np.int32)  # how the step's rows stand on the device

    def add(self, row: int, request: NewRequestData) -> None:
        for column in DEVICE_COLUMNS:
            number = self._columns[column.name][row : row + 1]
            self._upload.write(self._tables.offset(column.name, row), words_of(number, column.device_dtype))
        self._upload.write(self._tables.offset("token_ids", row), request.token_ids)

    def append_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        _, num_groups, width = self._tables.block_tables.shape
        for group in range(num_groups):
            offset = self._tables.offset("block_tables", row, group * width + start)
            self._upload.write(offset, block_ids[group::num_groups])

    def remove(self, row: int) -> None:
        pass  # nobody looks at a row without a request

    def send_shape(self, shape: StepShape, padded_to: int | None) -> None:
        """Tell the device who is in the step. In one where everybody decodes and samples, the rows are padded to this
        many, which is all that the device needs; and if they are those of the step before, nothing is sent."""
        size = self._tables.num_rows - 1
        rows = np.full(padded_to or size, self._tables.padding_row, dtype=np.int32)
        rows[: len(shape.rows)] = shape.rows
        if not np.array_equal(rows, self._sent_rows[: len(rows)]):
            self._write("batch_rows", rows)
            self._sent_rows = rows
        if padded_to is None:
            # Requests that are not there begin where the last one ends.
            self._write("query_start_loc", np.pad(shape.query_start_loc, (0, size - len(shape.rows)), "edge"))
            self._write("sampling_rows", shape.sampling_rows)
            self._write("logits_indices", shape.logits_indices)
            self._write("sampled_positions", shape.positions)

    def send_nobody(self) -> None:
        """A step without requests, for a graph that is captured."""
        size = self._tables.num_rows
        self._write("batch_rows", np.full(size - 1, self._tables.padding_row, dtype=np.int32))
        self._write("query_start_loc", np.zeros(size, dtype=np.int32))
        self.forget_sent()

    def _write(self, name: str, numbers: NDArray[Any]) -> None:
        self._upload.write(self._tables.offset(name), words_of(numbers, numbers.dtype.type))

    def forget_sent(self) -> None:
        """Nobody knows what a step that failed has left on the device."""
        self._sent_rows = np.empty(0, dtype=np.int32)


def words_of(numbers: NDArray[Any], dtype: type[np.generic]) -> list[int]:
    """Numbers of this type as the signed 32-bit words that they are in memory."""
    words: list[int] = numbers.astype(dtype).view(np.int32).tolist()
    return words


# --------------------------------------------------------------------------------------------------------------- upload
# The way of a step's diffs to the device: one copy, one scatter. Used by the runner and by `rows`.


class Upload:
    """Collects writes to a buffer (int32, flat) and sends them together. No word may be written twice in between."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._device = buffer.device
        self._starts: list[int] = []  # of the segments, each of which goes to consecutive words
        self._lengths: list[int] = []
        self._words: list[int] = []  # of all segments

    @property
    def num_words(self) -> int:
        """How many words have been written since the last time they were sent."""
        return len(self._words)

    def write(self, offset: int, words: Sequence[int]) -> None:
        """Words to write from `offset` on, as signed numbers of 32 bits."""
        if words:
            self._starts.append(offset)
            self._lengths.append(len(words))
            self._words += words

    def discard(self) -> None:
        """Forget what has not been sent."""
        self._starts, self._lengths, self._words = [], [], []

    def send(self) -> None:
        """Start copying and scattering what was written; whatever is started on the device from here on sees it."""
        if not self._starts:
            return
        sources = [0, *accumulate(self._lengths[:-1])]
        staged = host_tensor(3 * len(sources) + len(self._words), torch.int32, self._device)
        staged.numpy()[:] = [*self._starts, *self._lengths, *sources, *self._words]
        self.discard()
        scatter_words(self._buffer, staged.to(self._device, non_blocking=True), len(sources))


def host_tensor(size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for a copy from or to this device that nobody waits for: pinned, where it is a card.

    torch keeps pinned memory for the next to ask, and gives none away that a copy on its way still uses.
    """
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of what only some steps need; nobody waits for it."""
    staged = host_tensor(array.shape, torch.from_numpy(array[:0]).dtype, device)
    staged.copy_(torch.from_numpy(array))
    return staged.to(device, non_blocking=True)
