"""Rounds weights to the GGUF types that the `gguf` library reads but does not write, besides those of `k_quants`: Q2_K,
Q3_K and the IQ types.

Scales are plain ones, and every group of weights gets the nearest entry of its type's grid: files with good scales are
made by llama.cpp. The layouts are those of the library's `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SIGNED = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")  # with seven signs for eight weights, whose product is positive
_HALF_STEPS = (np.arange(16) + 0.5) / 4  # multipliers of a block's scale
_ODD = 2.0 * np.arange(16) + 1
_AT_ONCE = 2**18  # groups that are compared with a grid at a time


def quantize(values: Floats, kind: str) -> Bytes:
    """[rows, cols] -> [rows, bytes of a row], for any of KINDS."""
    blocks = values.reshape(-1, 32 if kind == "IQ4_NL" else 256)
    return KINDS[kind](blocks).reshape(len(values), -1)


def _scales(largest: Floats, multipliers: NDArray[Any]) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Scale of each block in float16 [n, 1], the index of each part's multiplier, and each part's scale [n, parts]."""
    d = (largest.max(1, keepdims=True) / multipliers[-1]).astype(np.float16)
    step = np.where(d > 0, d, 1).astype(np.float32)
    middles = (multipliers[1:] + multipliers[:-1]) / 2
    index = np.searchsorted(middles, largest / step)
    scale = step * multipliers[index].astype(np.float32)
    return d, index, scale


def _nearest(groups: Floats, grid: Floats) -> NDArray[np.uint16]:
    """[n, size] -> the index of the nearest entry of the grid [m, size]."""
    squares = (grid**2).sum(1) / 2
    parts = [groups[start : start + _AT_ONCE] for start in range(0, len(groups), _AT_ONCE)]
    return np.concatenate([(part @ grid.T - squares).argmax(1).astype(np.uint16) for part in parts])


def _grid(kind: str) -> Floats:
    found: Any = getattr(gguf.quants, kind)
    found.init_grid()
    grid: Floats = found.grid.reshape(found.grid_shape).astype(np.float32)
    return grid


def _in_grid(
    blocks: Floats, kind: str, per_scale: int, multipliers: NDArray[Any]
) -> tuple[Bytes, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Scales of blocks in bytes, multipliers' indices [n, parts], grid indices [n, groups], signs [n, 32] as bits."""
    grid = _grid(kind)
    parts = blocks.reshape(len(blocks), -1, per_scale)
    d, index, scale = _scales(np.abs(parts).max(-1) / grid.max(), multipliers)
    eights = (parts / scale[..., None]).reshape(len(blocks), 32, 8)
    negative, sizes = eights < 0, np.abs(eights)
    if kind in SIGNED:  # the smallest of eight changes its sign if there is an odd number of them
        odd = negative.sum(-1, keepdims=True) % 2 == 1
        flipped = odd & (np.arange(8) == sizes.argmin(-1)[..., None])
        negative, sizes = negative ^ flipped, np.where(flipped, -sizes, sizes)
    found = _nearest(sizes.reshape(-1, grid.shape[1]), grid).reshape(len(blocks), -1)
    return _bytes(d), index, found, np.packbits(negative, axis=-1, bitorder="little")[..., 0]


def _bytes(numbers: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)


def _joined(bits: NDArray[Any], width: int, count: int, dtype: type[Any]) -> Bytes:
    """Pack each `count` numbers of `width` bits into one of `dtype`, the first in the lowest bits."""
    shifts = (width * np.arange(count)).astype(dtype)
    words = bits.reshape(len(bits), -1, count).astype(dtype) << shifts
    return _bytes(np.bitwise_or.reduce(words, axis=-1))


def _iq2_xxs(blocks: Floats) -> Bytes:
    d, s, found, signs = _in_grid(blocks, "IQ2_XXS", 32, _HALF_STEPS)
    words = np.concatenate([_joined(found, 8, 4, np.uint32), _with_scales(signs, s)], axis=1)
    return np.concatenate([d, _bytes(words.reshape(-1, 2, 8, 4).swapaxes(1, 2))], axis=1)


def _with_scales(signs: NDArray[Any], s: NDArray[Any]) -> Bytes:
    """Words of four times seven signs, and a scale in the highest bits."""
    packed = _joined(signs & 127, 7, 4, np.uint32).view(np.uint32)
    return _bytes(packed | s.astype(np.uint32) << np.uint32(28))


def _iq2_xs(blocks: Floats) -> Bytes:
    d, s, found, signs = _in_grid(blocks, "IQ2_XS", 16, _HALF_STEPS)
    words = found | (signs.astype(np.uint16) & 127) << 9
    return np.concatenate([d, _bytes(words), _joined(s, 4, 2, np.uint8)], axis=1)


def _iq2_s(blocks: Floats) -> Bytes:
    d, s, found, signs = _in_grid(blocks, "IQ2_S", 16, _HALF_STEPS)
    high = _joined(found >> 8, 2, 4, np.uint8)
    return np.concatenate([d, (found & 255).astype(np.uint8), signs, high, _joined(s, 4, 2, np.uint8)], axis=1)


def _iq3_xxs(blocks: Floats) -> Bytes:
    d, s, found, signs = _in_grid(blocks, "IQ3_XXS", 32, 2 * _HALF_STEPS)
    return np.concatenate([d, found.astype(np.uint8), _with_scales(signs, s)], axis=1)


def _iq3_s(blocks: Floats) -> Bytes:
    d, s, found, signs = _in_grid(blocks, "IQ3_S", 32, _ODD)
    high = _joined(found >> 8, 1, 8, np.uint8)
    return np.concatenate([d, (found & 255).astype(np.uint8), high, signs, _joined(s, 4, 2, np.uint8)], axis=1)


def _of_three(blocks: Floats, per_scale: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """IQ1: each weight is -7/8, 1/8 or 9/8 of its scale."""
    parts = blocks.reshape(len(blocks), -1, per_scale)
    d, s, scale = _scales(1.5 * np.abs(parts).mean(-1), _ODD[:8])
    groups = (parts / scale[..., None]).reshape(-1, 8) - np.float32(0.125)
    return d, s, _nearest(groups, _grid("IQ1_S")).reshape(len(blocks), -1)


def _iq1_s(blocks: Floats) -> Bytes:
    d, s, found = _of_three(blocks, 32)
    high = _joined(found >> 8, 3, 4, np.uint16).view(np.uint16) | s.astype(np.uint16) << np.uint16(12)
    return np.concatenate([_bytes(d), (found & 255).astype(np.uint8), _bytes(high)], axis=1)


def _iq1_m(blocks: Floats) -> Bytes:
    d, s, found = _of_three(blocks, 16)
    nibbles = d.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)
    words = _joined(s, 3, 4, np.uint16).view(np.uint16) | nibbles << np.uint16(12)
    return np.concatenate([(found & 255).astype(np.uint8), _joined(found >> 8, 4, 2, np.uint8), _bytes(words)], axis=1)


def _sixteen(parts: Floats) -> NDArray[np.uint8]:
    """The nearest of IQ4's sixteen values."""
    values = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    return np.searchsorted((values[1:] + values[:-1]) / 2, parts).astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    d, _, scale = _scales(np.abs(blocks).max(1, keepdims=True) / 113, np.ones(1))
    q = _sixteen(blocks / scale)
    return np.concatenate([_bytes(d), q[:, :16] | q[:, 16:] << 4], axis=1)


def _iq4_xs(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    d, index, scale = _scales(np.abs(parts).max(-1) / 113, np.arange(1, 32))
    q, s = _sixteen(parts / scale[..., None]), index + 33
    packed = (q[..., :16] | q[..., 16:] << 4).reshape(len(blocks), -1)
    return np.concatenate(
        [_bytes(d), _joined(s >> 4, 2, 8, np.uint16), _joined(s & 15, 4, 2, np.uint8), packed], axis=1
    )


def _q3_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    d, index, scale = _scales(np.abs(parts).max(-1) / 3.5, np.arange(1, 32))
    q = np.rint(parts / scale[..., None]).clip(-4, 3).astype(np.int8).reshape(len(blocks), 256) + 4
    s = index + 33
    low, high = (q & 3).reshape(-1, 2, 4, 32).swapaxes(2, 3), (q >> 2).reshape(-1, 8, 32).swapaxes(1, 2)
    scales = np.concatenate(
        [s[:, :8] & 15 | (s[:, 8:] & 15) << 4, np.bitwise_or.reduce((s >> 4).reshape(-1, 4, 4) << _PAIRS, axis=1)],
        axis=1,
    )
    packed = _joined(high, 1, 8, np.uint8), _joined(low, 2, 4, np.uint8), scales.astype(np.uint8), _bytes(d)
    return np.concatenate(packed, axis=1)


_PAIRS = np.array([0, 2, 4, 6])[:, None]


def _q2_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    least = np.minimum(parts.min(-1), 0)
    d, s, scale = _scales((parts.max(-1) - least) / 3, np.arange(1, 16))
    m, t, offset = _scales(-least, np.arange(16))
    q = np.rint((parts + offset[..., None]) / scale[..., None]).clip(0, 3).astype(np.uint8)
    low = _joined(q.reshape(-1, 2, 4, 32).swapaxes(2, 3), 2, 4, np.uint8)
    return np.concatenate([(s + 1 | t << 4).astype(np.uint8), low, _bytes(d), _bytes(m)], axis=1)


KINDS: dict[str, Callable[[Floats], Bytes]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
