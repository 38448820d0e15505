"""Weights in the form that the library computes with. csrc/matrix.h says how each lies in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import QuantizedRows
from gpu.cpu.library import Library, MatrixStruct
from gpu.cpu.memory import WeightBuffer
from gpu.weights import Weight, floats

U4, U8, BF16 = 4, 8, 16  # `headrace::Form`
BLOCK = 32  # weights that share a scale, in U4 and U8
LANES = 16  # outputs of one tile
ROWS_AT_ONCE = 4096  # whole tiles

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
        self.struct.data = self.data.ctypes.data

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
    merged = _merge(parts, interleave)
    rows, cols = merged.shape
    is_in_blocks = quantized and cols % BLOCK == 0
    if is_in_blocks and isinstance(merged, QuantizedRows) and merged.type in _AS_THEY_ARE:
        form, code = _AS_THEY_ARE[merged.type]
        matrix = PackedMatrix(library, buffer, form, rows, cols)
        library.functions.hr_pack_blocks(matrix.struct, code, _pointer(merged.data), merged.data.shape[1])
        return matrix
    is_quantized = all(isinstance(part, QuantizedRows) for part in parts)
    matrix = PackedMatrix(library, buffer, U8 if is_in_blocks and is_quantized else BF16, rows, cols)
    _pack_floats(library, matrix, merged)
    return matrix


def _pack_floats(library: Library, matrix: PackedMatrix, rows: Weight) -> None:
    """Some rows at a time, because an embedding in float32 may be larger than the whole model."""
    for start in range(0, rows.shape[0], ROWS_AT_ONCE):
        part = np.ascontiguousarray(floats(rows[start : start + ROWS_AT_ONCE]))
        before = MatrixStruct(form=matrix.form, rows=start, cols=matrix.struct.cols)
        offset = library.functions.hr_matrix_bytes(before)
        struct = MatrixStruct(
            form=matrix.form, rows=len(part), cols=matrix.struct.cols, data=matrix.struct.data + offset
        )
        library.functions.hr_pack_floats(struct, _pointer(part))


def _merge(parts: Sequence[Weight], interleave: bool) -> Weight:
    """As the file has them, if they are all of one type, else in float32."""
    kinds = {part.type if isinstance(part, QuantizedRows) else part.dtype for part in parts}
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    if len(kinds) == 1 and quantized:
        data = _joined([part.data for part in quantized], interleave)
        return QuantizedRows(quantized[0].type, (len(data), quantized[0].shape[1]), data)
    plain = [part for part in parts if not isinstance(part, QuantizedRows)]
    return _joined(plain if len(kinds) == 1 else [floats(part) for part in parts], interleave)


def _joined(parts: Sequence[NDArray], interleave: bool) -> NDArray:
    if not interleave:
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
    tiles = [part.reshape(-1, 1, LANES, part.shape[1]) for part in parts]
    return np.ascontiguousarray(np.concatenate(tiles, axis=1).reshape(-1, parts[0].shape[1]))


def _pointer(array: NDArray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
