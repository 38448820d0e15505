"""What of the row table the device must know, and how it gets there. Used by the runner.

Tokens and block tables are sent and forgotten; of the columns the host keeps its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.device.tables import DEVICE_COLUMNS, DeviceTables
from gpu.device.upload import Upload
from gpu.rows import RowTable, StepShape


class DeviceRows:
    """A `gpu.rows.RowStore` that writes to `upload`. Not thread-safe."""

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
