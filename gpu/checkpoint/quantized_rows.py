"""A quantized tensor as its file holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantizedRows:
    """A matrix whose rows are blocks of one GGUF type. `data` may be a view of the mapped file: do not write to it."""

    type: str  # the name of a GGMLQuantizationType: "Q4_1"
    shape: tuple[int, int]  # rows and columns
    data: NDArray[np.uint8]  # [rows, bytes of a row]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [rows, columns], its own memory"""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        values: NDArray[np.float32] = dequantize(self.data, GGMLQuantizationType[self.type])
        return values
