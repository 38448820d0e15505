"""Weights in the form that the library computes with. csrc/matrix.h says how each lies in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import QuantizedRows
from gpu.cpu.library import Library, MatrixStruct
from gpu.cpu.memory import WeightBuffer
from gpu.weights import Weight

U4, U8, BF16 = 4, 8, 16  # `headrace::Form`
BLOCK = 32  # weights that share a scale, in U4 and U8
LANES = 16  # outputs of one tile

# GGUF types whose blocks are taken over as they are: the form, and what hr_pack_blocks calls them. Any other quantized
# type is rounded to U8, whose steps of 1/127 of a block's largest weight lie well below those of 6 bits and fewer.
# Steps are float16, so 6e-8 at least: blocks with no weight above 1e-4 lose bits, and weights below 3e-8 are zero.
_AS_THEY_ARE = {"Q4_0": (U4, 40), "Q4_1": (U4, 41), "Q8_0": (U8, 80)}


class PackedMatrix:
    """One [rows, cols] matrix. `struct` points into `data`, which must outlive every use of it."""

    def __init__(self, library: Library, buffer: WeightBuffer, form: int, rows: int, cols: int) -> None:
        self.struct = MatrixStruct(form=form, rows=rows, cols=cols, unused=0, data=None)
        size = library.functions.hr_matrix_bytes(self.struct)
        self.data = buffer.take(size)
        self.struct.data = self.data.data_ptr()

    @property
    def form(self) -> int:
        return self.struct.form


def padded_rows(struct: MatrixStruct) -> int:
    """The rows rounded up to whole tiles: how wide a result is."""
    rows: int = struct.rows
    return -(-rows // LANES) * LANES


def pack(
    library: Library, buffer: WeightBuffer, parts: Sequence[Weight], *, interleave: bool = False, quantized: bool = True
) -> PackedMatrix:
    """One matrix of several parts, one below the other; with `interleave` of two parts, tile by tile in turns.

    Parts of one GGUF type that can be taken as it is keep their bits. Otherwise, quantized parts become U8 and all
    others bfloat16; `quantized` False makes everything bfloat16.
    """
    kinds = {part.type if isinstance(part, QuantizedRows) else None for part in parts}
    rows, cols = sum(part.shape[0] for part in parts), parts[0].shape[1]
    kind = kinds.pop() if len(kinds) == 1 else ""
    if quantized and kind in _AS_THEY_ARE and cols % BLOCK == 0:
        form, code = _AS_THEY_ARE[kind]
        blocks = _merge([part.data for part in parts if isinstance(part, QuantizedRows)], interleave)
        matrix = PackedMatrix(library, buffer, form, rows, cols)
        library.functions.hr_pack_blocks(matrix.struct, code, _pointer(blocks), blocks.shape[1])
        return matrix
    is_quantized = all(isinstance(part, QuantizedRows) for part in parts)
    form = U8 if quantized and is_quantized and cols % BLOCK == 0 else BF16
    floats = _merge([_floats(part) for part in parts], interleave)
    matrix = PackedMatrix(library, buffer, form, rows, cols)
    library.functions.hr_pack_floats(matrix.struct, _pointer(floats))
    return matrix


def _floats(part: Weight) -> NDArray[np.float32]:
    if isinstance(part, QuantizedRows):
        return part.dequantize()
    array: NDArray[np.float32] = part.detach().float().numpy()
    return array


def _merge(parts: Sequence[NDArray], interleave: bool) -> NDArray:
    if not interleave:
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
    tiles = [part.reshape(-1, 1, LANES, part.shape[1]) for part in parts]
    return np.ascontiguousarray(np.concatenate(tiles, axis=1).reshape(-1, parts[0].shape[1]))


def _pointer(array: NDArray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
