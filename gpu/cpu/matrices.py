"""Weights in the form that the library computes with. csrc/matrix.h says how each lies in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import QuantizedRows
from gpu.checkpoint.gguf_file import TENSOR_TYPES
from gpu.cpu.library import Library, MatrixStruct, PartStruct
from gpu.cpu.memory import WeightBuffer
from gpu.weights import Weight, floats

U4, U5, U8, BF16, K4, K5, K6 = 4, 5, 8, 16, 44, 45, 46  # `headrace::Form`
FORMS = {  # for the log
    U4: "4-bit",
    U5: "5-bit",
    U8: "8-bit",
    BF16: "bfloat16",
    K4: "4-bit K",
    K5: "5-bit K",
    K6: "6-bit K",
}
LANES = 16  # outputs of one tile
ROWS_AT_ONCE = 4096  # that are widened to float32, and packed

# GGUF types whose blocks are used unchanged, and their forms. MXFP4 becomes Q8_0, which holds the same numbers. Any
# other quantized type is rounded to U8, whose steps of 1/127 of a block's largest weight are much finer than those of 6
# bits and fewer. Steps are float16, so at least 6e-8: blocks without a weight above 1e-4 lose bits, and weights below
# 3e-8 become zero.
_AS_THEY_ARE = {"Q4_0": U4, "Q4_1": U4, "Q5_0": U5, "Q5_1": U5, "Q8_0": U8, "Q4_K": K4, "Q5_K": K5, "Q6_K": K6}
_NUMBERS = {tensor_type.name: tensor_type.number for tensor_type in TENSOR_TYPES}
# The forms of these types have an offset of so many scales. If it is no float16, U8 holds the same numbers.
_OFFSETS = {"Q4_0": 8, "Q5_0": 16}
_LARGEST_HALF = 65504.0
_BLOCK = 32  # weights that share a scale in U8


class PackedMatrix:
    """One [rows, cols] matrix. `struct` points into `data`, which must outlive every use of it."""

    def __init__(self, library: Library, buffer: WeightBuffer, parts: Sequence[tuple[int, int]], cols: int) -> None:
        """`parts` are forms and how many rows each has: a multiple of LANES, but for the last."""
        self.forms = {form for form, _ in parts}
        self.struct = MatrixStruct(rows=sum(rows for _, rows in parts), cols=cols)
        tiles = [-(-rows // LANES) for _, rows in parts]
        sizes = [
            count * library.functions.hr_tile_bytes(self.struct, form)
            for (form, _), count in zip(parts, tiles, strict=True)
        ]
        self.data = buffer.take(sum(sizes))
        at = self.data.ctypes.data
        for index, ((form, _), count, size) in enumerate(zip(parts, tiles, sizes, strict=True)):
            self.struct.parts[index] = PartStruct(form=form, tiles=count, data=at)
            at += size


def pack(
    library: Library,
    buffer: WeightBuffer,
    weights: Sequence[Weight],
    *,
    interleave: bool = False,
    quantized: bool = True,
) -> PackedMatrix:
    """One matrix of up to three, one below the other; with `interleave` of two, tile by tile in turns.

    Each keeps the bits that a GGUF file has for it, where the library has a form for its type; other quantized types
    become U8, and all else bfloat16. `quantized` False makes everything bfloat16. What takes turns, or does not fill
    whole tiles, gets one form: its own if it is the same, else U8 if all are quantized. U8 holds Q4_0, Q5_0 and MXFP4
    exactly, and other types within half a step: 1/254 of the largest weight of 32.
    """
    if quantized:
        weights = [_as_it_is_taken(weight) for weight in weights]
    forms = [_form(weight) if quantized else BF16 for weight in weights]
    rows, cols = [weight.shape[0] for weight in weights], weights[0].shape[1]
    if interleave or any(count % LANES for count in rows[:-1]):
        common = forms[0] if len(set(forms)) == 1 else BF16 if BF16 in forms else U8
        if common == U8:
            weights = [_exact_in_8_bits(weight) for weight in weights]
        matrix = PackedMatrix(library, buffer, [(common, sum(rows))], cols)
        forms = [common] * len(forms)
    else:
        matrix = PackedMatrix(library, buffer, list(zip(forms, rows, strict=True)), cols)
    first = 0
    for weight, form in zip(weights, forms, strict=True):
        _pack_rows(library, matrix, weight, form, first, len(weights) if interleave else 1)
        first += LANES if interleave else weight.shape[0]
    return matrix


def _as_it_is_taken(weight: Weight) -> Weight:
    """Return the same numbers in a type that the library uses unchanged, if it would use the own type with a loss."""
    if not isinstance(weight, QuantizedRows) or weight.shape[1] % _BLOCK:
        return weight
    if weight.type == "MXFP4":
        return weight.as_q8_0() or floats(weight)  # bfloat16 holds them, too, in twice the memory
    if weight.type in _OFFSETS:
        blocks = weight.data.reshape(-1, weight.data.shape[-1] * _BLOCK // weight.shape[1])
        scales = np.abs(np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32))
        if np.any(np.isfinite(scales) & (scales > _LARGEST_HALF / _OFFSETS[weight.type])):
            return weight.as_q8_0() or weight
    return weight


def _exact_in_8_bits(weight: Weight) -> Weight:
    """Return the same numbers in Q8_0, if it holds them."""
    return (weight.as_q8_0() or weight) if isinstance(weight, QuantizedRows) else weight


def _form(weight: Weight) -> int:
    if not isinstance(weight, QuantizedRows) or weight.shape[1] % _BLOCK:
        return BF16
    return _AS_THEY_ARE.get(weight.type, U8)


def _pack_rows(library: Library, matrix: PackedMatrix, weight: Weight, form: int, first: int, turns: int) -> None:
    """A weight's rows become rows of the matrix from row `first` on, those of a tile in every `turns` tiles."""
    if isinstance(weight, QuantizedRows) and _form(weight) == form and weight.type in _AS_THEY_ARE:
        rows, kind = np.ascontiguousarray(weight.data), _NUMBERS[weight.type]
        library.functions.hr_pack_blocks(matrix.struct, kind, _pointer(rows), rows.shape[1], first, len(rows), turns)
        return
    # Some rows at a time, because an embedding in float32 may be larger than the whole model.
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = np.ascontiguousarray(floats(weight[start : start + ROWS_AT_ONCE]))
        library.functions.hr_pack_floats(matrix.struct, _pointer(part), first + start * turns, len(part), turns)


def _pointer(array: NDArray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
