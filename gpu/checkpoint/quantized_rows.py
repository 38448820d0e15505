"""Quantized weights: rows of blocks as a GGUF file has them, and their lossless conversion into other blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TensorType(NamedTuple):
    """A type of github.com/ggml-org/ggml/blob/master/include/ggml.h."""

    name: str
    number: int
    block: int  # weights per block
    block_bytes: int


TENSOR_TYPES = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("BF16", 30, 1, 2),
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("MXFP4", 39, 32, 17),
)

# Types of this project: a number is an integer of 8 bits (S8) or a bfloat16 (S16) times a float32 scale, which S8 has
# for 16 numbers and S16 for 32. A block has its scales before its numbers.
OWN_TYPES = (TensorType("S8", 1000, 32, 40), TensorType("S16", 1001, 32, 68))

_BLOCK = 32
MXFP4_DOUBLED = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8
)  # by the 4 bits of a number


def _e4m3() -> NDArray[np.uint16]:
    """Return the bfloat16 bits of each E4M3 number: 1 bit for the sign, 4 for the exponent, 3 for the mantissa."""
    bits = np.arange(256)
    exponents, mantissas = bits >> 3 & 15, bits & 7
    sizes = np.where(exponents == 0, np.ldexp(mantissas, -9), np.ldexp(8.0 + mantissas, exponents - 10))
    sizes[[127, 255]] = np.nan
    return (np.where(bits < 128, sizes, -sizes).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


E4M3 = _e4m3()


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
        data = self.data[rows]
        return QuantizedRows(self.type, (len(data), *self.shape[1:]), data)

    def dequantize(self) -> NDArray[np.float32]:
        """Return float32 of this shape, in new memory."""
        if self.type in ("S8", "S16"):
            return self._scaled()
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        values: NDArray[np.float32] = dequantize(self.data, GGMLQuantizationType[self.type])
        return values if values.flags.writeable else values.copy()

    def as_q8_0(self) -> QuantizedRows | None:
        """Return the rows as Q8_0 if that is exact, else None: for types with an offset or with scales of scales, and
        for MXFP4 with a scale that is not a float16."""
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

    def _scaled(self) -> NDArray[np.float32]:
        in_bytes = self.type == "S8"
        blocks = self.data.reshape(*self.data.shape[:-1], -1, 40 if in_bytes else 68)
        start = 8 if in_bytes else 4
        scales = np.ascontiguousarray(blocks[..., :start]).view(np.float32)
        numbers = np.ascontiguousarray(blocks[..., start:])
        values = numbers.view(np.int8).astype(np.float32) if in_bytes else from_bfloat16(numbers.view(np.uint16))
        return (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(self.shape)

    def in_served_type(self) -> QuantizedRows | None:
        """Return exactly the same numbers in a type that the C++ library has a form for. None if there is none."""
        if self.type not in _SERVED_AS:
            return None
        count = max(1, _AT_ONCE // self.shape[1])
        parts = [self[start : start + count]._converted() for start in range(0, self.shape[0], count)]
        return QuantizedRows(parts[0].type, self.shape, np.concatenate([part.data for part in parts]))

    def _converted(self) -> QuantizedRows:
        wanted, scales_of = _SERVED_AS[self.type]
        block, size = _SIZES[self.type]
        d, s = scales_of(np.ascontiguousarray(self.data).reshape(-1, size))
        per_scale = block // s.shape[1]
        scales = (d * s.astype(np.float32)).reshape(self.shape[0], -1)
        values = self.dequantize().reshape(*scales.shape, per_scale)
        with np.errstate(invalid="ignore", divide="ignore"):  # scales of a damaged file may be anything
            numbers = np.nan_to_num(np.rint(values / scales[..., None]), posinf=0, neginf=0).astype(np.int8)
        if wanted == "Q6_K":
            return _q6_k(numbers.reshape(self.shape), d, s)
        return _in_blocks(wanted, numbers.reshape(self.shape), scales, per_scale)


def q8_0_of_powers(
    exponents: NDArray[np.int32], numbers: NDArray[np.int8], shape: tuple[int, ...]
) -> QuantizedRows | None:
    """Return Q8_0 rows from blocks [..., 32] of multiples of powers of two; None if a power is not a float16."""
    if np.any((exponents < -24) | (exponents > 15)):
        return None
    steps = np.ldexp(np.float32(1), exponents).astype(np.float16)[..., None].view(np.uint8)
    return _q8_0(steps, numbers, shape)


def _q8_0(steps: NDArray[np.uint8], numbers: NDArray[np.int8], shape: tuple[int, ...]) -> QuantizedRows:
    data = np.concatenate([steps, numbers.view(np.uint8)], axis=-1)
    return QuantizedRows("Q8_0", shape, data.reshape(*data.shape[:-2], -1))


# ---------------------------------------------------------------------------------------------------------- conversions


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a quantized matrix as they are stored, for a device that computes with them: scale (q - zero)."""

    bits: int  # 4 or 8; 0: q is an E4M3 number, and zero is 0
    numbers: NDArray[np.uint8]  # [rows, inputs], one number in a byte
    scales: NDArray[np.float32]  # [rows, groups]
    zeros: NDArray[np.uint8]  # [rows, groups]
    groups: NDArray[Any]  # [inputs], the group of each
    ndim = 2

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def __getitem__(self, index: Any) -> PackedRows:
        """Return some rows, or some rows and a range of inputs."""
        rows, cols = index if isinstance(index, tuple) else (index, slice(None))
        numbers = self.numbers[rows][:, cols]
        return PackedRows(self.bits, numbers, self.scales[rows], self.zeros[rows], self.groups[cols])

    def dequantize(self) -> NDArray[np.float32]:
        """Return float32 of this shape, in new memory."""
        if self.bits == 0:
            return from_bfloat16(E4M3[self.numbers]) * self.scales[:, self.groups]
        differences = self.numbers.astype(np.float32) - self.zeros[:, self.groups]
        return differences * self.scales[:, self.groups]

    def fields(self) -> dict[str, Any] | None:
        """Return the fields of a `gpu.weights.tensors.QuantizedMatrix`, or None if its kernel cannot take these rows:
        groups of different sizes, or that are no multiple of 16 inputs (32 of E4M3)."""
        used, sizes = np.unique(self.groups, return_counts=True)
        order, cols = np.argsort(self.groups, kind="stable"), self.shape[1]
        group = int(sizes[0]) if len(used) > 1 else 0
        per_byte = 2 if self.bits == 4 else 1
        widths = (64, 32) if self.bits == 0 else (64, 32, 16)
        allowed = [n for n in widths if group % n == 0 and (per_byte == 1 or cols % (2 * n) == 0)]
        if not allowed or any(sizes[:-1] != group) or sizes[-1] > (group or cols):
            return None
        in_order = bool(np.array_equal(order, np.arange(cols)))
        numbers = self.numbers if in_order else self.numbers[:, order]
        if per_byte == 2:
            tiles = numbers.reshape(len(numbers), -1, 2, allowed[0])
            numbers = (tiles[:, :, 0] | tiles[:, :, 1] << np.uint8(4)).reshape(len(numbers), -1)
        zeros = self.zeros[:, used]
        has_zeros = bool(np.any(zeros != zeros.flat[0]))
        return {
            "numbers": np.ascontiguousarray(numbers),
            "scales": np.ascontiguousarray(self.scales[:, used].T),
            "zeros": np.ascontiguousarray(zeros.T) if has_zeros else None,
            "order": None if in_order else order,
            "zero": 0 if has_zeros else int(zeros.flat[0]),
            "bits": self.bits,
            "group": group,
            "columns": allowed[0],
        }


def scaled_rows(
    numbers: NDArray[Any], scales: NDArray[np.float32], per_scale: int
) -> QuantizedRows | NDArray[np.float32]:
    """Return integers of 8 bits, or bfloat16 bits, times their scales: [rows, cols] and [rows, scales of a row].

    The smallest type that holds them exactly is taken; float32 if a scale is shared by fewer than 16 or 32 numbers.
    """
    cols = numbers.shape[1]
    integers = numbers.dtype == np.int8
    if cols % _BLOCK or per_scale % (16 if integers else _BLOCK):
        values = numbers.astype(np.float32) if integers else from_bfloat16(numbers)
        return values * np.repeat(scales, per_scale, axis=1)[:, :cols]
    if not integers:
        return _in_blocks("S16", numbers, scales, per_scale)
    with np.errstate(over="ignore"):
        fit = per_scale % _BLOCK == 0 and np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
    least, most = numbers.min(), numbers.max()
    halves = "Q4_0" if least >= -8 and most < 8 else "Q5_0" if least >= -16 and most < 16 else "Q8_0"
    return _in_blocks(halves if fit else "S8", numbers, scales, per_scale)


def _in_blocks(kind: str, numbers: NDArray[Any], scales: NDArray[np.float32], per_scale: int) -> QuantizedRows:
    """Return numbers times scales in blocks of a type that holds them exactly."""
    rows, cols = numbers.shape
    per_block = 16 if kind == "S8" else _BLOCK
    scales = np.repeat(scales, per_scale // per_block, axis=1)[:, : cols // per_block]
    blocks = np.ascontiguousarray(numbers).reshape(rows, cols // _BLOCK, _BLOCK)
    if kind in ("S8", "S16"):
        fields = [np.ascontiguousarray(scales).reshape(rows, cols // _BLOCK, -1).view(np.uint8), blocks.view(np.uint8)]
    else:
        fields = [scales.astype(np.float16)[..., None].view(np.uint8)]
        if kind == "Q8_0":
            fields.append(blocks.view(np.uint8))
        else:
            q = (blocks + np.int8(8 if kind == "Q4_0" else 16)).view(np.uint8)
            if kind == "Q5_0":
                fields.append(np.packbits(q >> 4, axis=-1, bitorder="little"))
            fields.append(q[..., :16] & np.uint8(15) | q[..., 16:] << np.uint8(4))
    return QuantizedRows(kind, (rows, cols), np.concatenate(fields, axis=-1).reshape(rows, -1))


def _q6_k(numbers: NDArray[np.int8], d: NDArray[np.float32], s: NDArray[Any]) -> QuantizedRows:
    """Return numbers from -32 to 31 as Q6_K. A block of 256 has a float16 `d`; its scales are `d` times `s`."""
    q = (numbers + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    low = q[:, :, :2] & np.uint8(15) | q[:, :, 2:] << np.uint8(4)
    high = np.bitwise_or.reduce(q >> np.uint8(4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    scales = np.repeat(s, 16 // s.shape[1], axis=1).astype(np.int8).view(np.uint8)
    fields = (low.reshape(-1, 128), high.reshape(-1, 64), scales, d.astype(np.float16).view(np.uint8))
    return QuantizedRows("Q6_K", numbers.shape, np.concatenate(fields, axis=1).reshape(len(numbers), -1))


# The scales of types with numbers that are small integers times d s: d [blocks, 1] in float32, and integers s
# [blocks, n] for n equal parts of a block. Fields: github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

_Scales = tuple[NDArray[np.float32], NDArray[Any]]


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _words(blocks: NDArray[np.uint8], dtype: type[Any], start: int, stop: int) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _nibbles(blocks: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.uint8]:
    both = blocks[:, start:stop, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return both.reshape(len(blocks), -1)


def _plain(at: int) -> Callable[[NDArray[np.uint8]], _Scales]:
    return lambda blocks: (_half(blocks, at), np.ones((len(blocks), 1), np.int8))


def _odd(
    part: float, bits: Callable[[NDArray[np.uint8]], NDArray[Any]], d: Callable[..., NDArray[np.float32]] = _half
) -> Callable[[NDArray[np.uint8]], _Scales]:
    """Scales 2 b + 1 from the bits b, and d as this fraction of the file's."""
    return lambda blocks: (d(blocks, 0) * np.float32(part), 2 * bits(blocks).astype(np.int8) + np.int8(1))


def _of_q3_k(blocks: NDArray[np.uint8]) -> _Scales:
    low = (blocks[:, None, 96:104] >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)).reshape(-1, 16)
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)).reshape(-1, 16)
    return _half(blocks, 108), (low | high << np.uint8(4)).view(np.int8) - np.int8(32)


def _of_iq4_xs(blocks: NDArray[np.uint8]) -> _Scales:
    high = (_words(blocks, np.uint16, 2, 4) >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    return _half(blocks, 0), (_nibbles(blocks, 4, 8) | high << np.uint8(4)).view(np.int8) - np.int8(32)


def _d_of_iq1_m(blocks: NDArray[np.uint8], _: int) -> NDArray[np.float32]:
    parts = (_words(blocks, np.uint16, 48, 56) & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    return np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)


def _bits_of_iq1_m(blocks: NDArray[np.uint8]) -> NDArray[np.uint16]:
    words = _words(blocks, np.uint16, 48, 56)
    return (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16).astype(np.uint16)


_SERVED_AS: dict[str, tuple[str, Callable[[NDArray[np.uint8]], _Scales]]] = {
    "Q3_K": ("Q6_K", _of_q3_k),
    "IQ4_NL": ("Q8_0", _plain(0)),
    "IQ4_XS": ("S8", _of_iq4_xs),
    "IQ3_XXS": ("S8", _odd(1 / 4, lambda blocks: _words(blocks, np.uint32, 66, 98) >> 28)),
    "IQ3_S": ("Q6_K", _odd(1, lambda blocks: _nibbles(blocks, 106, 110))),
    "IQ2_XXS": ("S8", _odd(1 / 8, lambda blocks: _words(blocks, np.uint32, 2, 66)[:, 1::2] >> 28)),
    "IQ2_XS": ("S8", _odd(1 / 8, lambda blocks: _nibbles(blocks, 66, 74))),
    "IQ2_S": ("S8", _odd(1 / 8, lambda blocks: _nibbles(blocks, 74, 82))),
    "IQ1_S": ("S8", _odd(1 / 8, lambda blocks: _words(blocks, np.uint16, 34, 50) >> 12 & 7)),
    "IQ1_M": ("S8", _odd(1 / 8, _bits_of_iq1_m, _d_of_iq1_m)),
    "TQ1_0": ("Q4_0", _plain(52)),
    "TQ2_0": ("Q4_0", _plain(64)),
}
_AT_ONCE = 2**22  # weights that are converted at a time
_SIZES = {each.name: (each.block, each.block_bytes) for each in TENSOR_TYPES}
