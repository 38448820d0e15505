"""A tensor of a GGUF type as its file holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 32
MXFP4_DOUBLED = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8
)  # by the 4 bits of a number


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

    def as_q8_0(self) -> QuantizedRows | None:
        """Return exactly the same numbers as Q8_0. None if it cannot hold them: for types with an offset or with scales
        of scales, and for MXFP4 with a scale that is no float16."""
        if self.type == "Q8_0":
            return self
        if self.type not in ("Q4_0", "Q5_0", "MXFP4"):
            return None
        blocks = self.data.reshape(*self.data.shape[:-1], self.shape[-1] // _BLOCK, -1)
        halves = blocks[..., -_BLOCK // 2 :]  # the first 16 of a block in the lower bits, the others in the higher
        numbers = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)
        if self.type == "MXFP4":
            return q8_0_of_powers(blocks[..., 0].astype(np.int32) - 128, MXFP4_DOUBLED[numbers], self.shape)
        if self.type == "Q5_0":
            numbers |= np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little") << np.uint8(4)
        centred = numbers.view(np.int8) - np.int8(16 if self.type == "Q5_0" else 8)
        return _q8_0(blocks[..., :2], centred, self.shape)


def q8_0_of_powers(
    exponents: NDArray[np.int32], numbers: NDArray[np.int8], shape: tuple[int, ...]
) -> QuantizedRows | None:
    """Return rows of this shape from blocks [..., 32] of multiples of a power of two; None if one is no float16."""
    if np.any((exponents < -24) | (exponents > 15)):
        return None
    steps = np.ldexp(np.float32(1), exponents).astype(np.float16)[..., None].view(np.uint8)
    return _q8_0(steps, numbers, shape)


def _q8_0(steps: NDArray[np.uint8], numbers: NDArray[np.int8], shape: tuple[int, ...]) -> QuantizedRows:
    data = np.concatenate([steps, numbers.view(np.uint8)], axis=-1)
    return QuantizedRows("Q8_0", shape, data.reshape(*data.shape[:-2], -1))
