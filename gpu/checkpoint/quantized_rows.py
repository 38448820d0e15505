"""A tensor of a GGUF type as its file holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantizedRows:
    """Rows that are blocks of one GGUF type. `data` may be a view of the mapped file: do not write to it."""

    type: str  # the name of a GGMLQuantizationType: "Q4_1"
    shape: tuple[int, ...]  # columns last
    data: NDArray[np.uint8]  # [..., bytes of a row]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __getitem__(self, rows: slice) -> QuantizedRows:
        """Some of the rows."""
        data = self.data[rows]
        return QuantizedRows(self.type, (len(data), *self.shape[1:]), data)

    def dequantize(self) -> NDArray[np.float32]:
        """float32 of this shape, its own memory"""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        values: NDArray[np.float32] = dequantize(self.data, GGMLQuantizationType[self.type])
        return values if values.flags.writeable else values.copy()
