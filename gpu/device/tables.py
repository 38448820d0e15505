"""The requests' rows on the device, and their updates.

All tables are views of one int32 tensor, the buffer, so that all changes from one step to the next are one list of
(offset, values) and one scatter. Tables of other types view its words as float32 or int64.
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

# Rows of logits that are penalized together: the kernel needs a word of scratch for each row and token.
PENALIZED_TOGETHER = 32

DEVICE_COLUMNS = [column for column in COLUMNS if not column.host_only]


def device_columns(num_rows: int) -> dict[str, torch.Tensor]:
    """Return a device's columns of the row table, [num_rows] each, filled with defaults, in host memory."""
    return {
        column.name: torch.from_numpy(np.full(num_rows, column.default, dtype=column.device_dtype))
        for column in DEVICE_COLUMNS
    }


class DeviceTables:
    """The tables of a device. Rows 0 .. max_num_seqs - 1 are for requests; one more, `padding_row`, stays empty, for
    the padding of a graph."""

    def __init__(self, sizes: BatchSizes, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = sizes.block_size
        self.padding_row = sizes.max_num_seqs
        self.num_rows = sizes.max_num_seqs + 1
        self._offsets: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._size = 0

        columns = device_columns(self.num_rows)
        # The current step, as in `gpu.runner.rows.StepShape`: for each sampled position its row, its index among the
        # tokens, and the position in its request of the token to be drawn; for each request its row, its first token
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
        self.one_each = torch.arange(self.num_rows, dtype=torch.int32, device=device)  # query_start_loc of decodes
        self.penalty_scratch = torch.zeros((PENALIZED_TOGETHER, vocab_size), dtype=torch.int32, device=device)

    def view(self, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return a table as a flat view of the buffer."""
        offset = self._offsets[name]
        return self.buffer[offset : offset + self.num_rows * self._widths[name]].view(dtype)

    def offset(self, name: str, row: int = 0, index: int = 0) -> int:
        """Return the offset in the buffer of word `index` of this row."""
        return self._offsets[name] + row * self._widths[name] + index

    def _place(self, name: str, width: int) -> None:
        self._offsets[name] = self._size
        self._widths[name] = width
        self._size += width * self.num_rows


# ----------------------------------------------------------------------------------------------------------------- rows


class DeviceRows:
    """A `gpu.runner.rows.RowStore` that writes to `upload`. The host keeps no copy of tokens and block tables. Not
    thread-safe."""

    def __init__(self, table: RowTable, tables: DeviceTables, upload: Upload) -> None:
        self._columns = table.columns
        self._tables = tables
        self._upload = upload
        self._sent_rows = np.empty(0, dtype=np.int32)  # the rows of the last step, as the device has them

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
        pass  # a row without a request is never read

    def send_shape(self, shape: StepShape, padded_to: int | None) -> None:
        """Send the shape of a step. A step in which every request decodes and samples needs only the rows, padded to
        `padded_to`; if they equal those of the step before, nothing is sent."""
        size = self._tables.num_rows - 1
        rows = np.full(padded_to or size, self._tables.padding_row, dtype=np.int32)
        rows[: len(shape.rows)] = shape.rows
        if not np.array_equal(rows, self._sent_rows[: len(rows)]):
            self._write("batch_rows", rows)
            self._sent_rows = rows
        if padded_to is None:
            # Padding begins at the end of the last request.
            self._write("query_start_loc", np.pad(shape.query_start_loc, (0, size - len(shape.rows)), "edge"))
            self._write("sampling_rows", shape.sampling_rows)
            self._write("logits_indices", shape.logits_indices)
            self._write("sampled_positions", shape.positions)

    def send_nobody(self) -> None:
        """Send a step without requests, for the capture of a graph."""
        size = self._tables.num_rows
        self._write("batch_rows", np.full(size - 1, self._tables.padding_row, dtype=np.int32))
        self._write("query_start_loc", np.zeros(size, dtype=np.int32))
        self.forget_sent()

    def _write(self, name: str, numbers: NDArray[Any]) -> None:
        self._upload.write(self._tables.offset(name), words_of(numbers, numbers.dtype.type))

    def forget_sent(self) -> None:
        """Assume nothing about the device's rows, as after a step that failed."""
        self._sent_rows = np.empty(0, dtype=np.int32)


def words_of(numbers: NDArray[Any], dtype: type[np.generic]) -> list[int]:
    """Return numbers of this type as signed 32-bit words."""
    words: list[int] = numbers.astype(dtype).view(np.int32).tolist()
    return words


# --------------------------------------------------------------------------------------------------------------- upload


class Upload:
    """Collects writes to a buffer (int32, flat) and sends them by one copy and one scatter. No word may be written
    twice before it is sent."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._device = buffer.device
        self._starts: list[int] = []  # the offset of each segment, a run of consecutive words
        self._lengths: list[int] = []
        self._words: list[int] = []  # the words of all segments

    @property
    def num_words(self) -> int:
        """The number of words that are not sent yet."""
        return len(self._words)

    def write(self, offset: int, words: Sequence[int]) -> None:
        """Write words from `offset` on, as signed numbers of 32 bits."""
        if words:
            self._starts.append(offset)
            self._lengths.append(len(words))
            self._words += words

    def discard(self) -> None:
        """Drop all words that are not sent yet."""
        self._starts, self._lengths, self._words = [], [], []

    def send(self) -> None:
        """Start to copy and scatter all written words; work that is started on the device after it sees them."""
        if not self._starts:
            return
        sources = [0, *accumulate(self._lengths[:-1])]
        staged = host_tensor(3 * len(sources) + len(self._words), torch.int32, self._device)
        staged.numpy()[:] = [*self._starts, *self._lengths, *sources, *self._words]
        self.discard()
        scatter_words(self._buffer, staged.to(self._device, non_blocking=True), len(sources))


def host_tensor(size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory for an asynchronous copy from or to this device: pinned, if the device is a GPU.

    torch reuses pinned memory, but none that a copy in progress still uses.
    """
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Start copying an array that only some steps need, without waiting."""
    staged = host_tensor(array.shape, torch.from_numpy(array[:0]).dtype, device)
    staged.copy_(torch.from_numpy(array))
    return staged.to(device, non_blocking=True)
