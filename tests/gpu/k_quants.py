"""Rounds weights to the types of blocks of 256 that the `gguf` library reads but does not write: Q4_K, Q5_K and Q6_K.

Scales are plain ones, from the least to the largest weight: files with good ones are made by llama.cpp. All that is
wanted of these is that they are files of their type.
"""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.gpu import grid_quants

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types that current files have most, which the C++ library keeps packed."""


def quantize(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """[rows, cols] -> [rows, bytes of a row], for any type."""
    if kind in grid_quants.KINDS:
        return grid_quants.quantize(values, kind)
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = values.reshape(-1, 256)
    packed = _q6_k(blocks) if kind == "Q6_K" else _q45_k(blocks, 4 if kind == "Q4_K" else 5)
    return packed.reshape(len(values), -1)


def _halves(numbers: NDArray) -> NDArray[np.float16]:
    return numbers.astype(np.float16)


def _bytes(halves: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(halves).view(np.uint8).reshape(len(halves), -1)


def _over(numbers: NDArray, steps: NDArray) -> NDArray:
    """What numbers / steps are, 0 where a step is 0."""
    return np.divide(numbers, steps, out=np.zeros_like(numbers), where=np.broadcast_to(steps, numbers.shape) != 0)


def _q45_k(blocks: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Eight blocks of 32, w = D s q - M t: 6 bits of s and t for each, D and M for all."""
    parts = blocks.reshape(-1, 8, 32)
    least = np.minimum(parts.min(-1), 0)
    steps = (parts.max(-1) - least) / (2**bits - 1)
    big_d, big_m = _halves(steps.max(-1, keepdims=True) / 63), _halves(-least.min(-1, keepdims=True) / 63)
    s = np.rint(_over(steps, big_d.astype(np.float32))).clip(0, 63)
    t = np.rint(_over(-least, big_m.astype(np.float32))).clip(0, 63)
    scale, offset = (big_d * s)[..., None].astype(np.float32), (big_m * t)[..., None].astype(np.float32)
    q = np.rint(_over(parts + offset, scale)).clip(0, 2**bits - 1).astype(np.uint8)
    s, t = s.astype(np.uint8), t.astype(np.uint8)
    # The first four pairs have six bits of a byte, the last four the rest: four bits of each pair and two of each byte.
    scales = np.concatenate(
        (s[:, :4] | s[:, 4:] >> 4 << 6, t[:, :4] | t[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4), axis=1
    )
    low = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate((_bytes(big_d), _bytes(big_m), scales, *([high] if bits == 5 else []), low), axis=1)


def _q6_k(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Sixteen blocks of 16, w = D s (q - 32): 8 bits of s for each, D for all."""
    parts = blocks.reshape(-1, 16, 16)
    steps = np.abs(parts).max(-1) / 31
    big_d = _halves(steps.max(-1, keepdims=True) / 127)
    s = np.rint(_over(steps, big_d.astype(np.float32))).clip(-128, 127)
    q = np.rint(_over(parts, (big_d * s)[..., None].astype(np.float32))).clip(-32, 31) + 32
    halves = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # of 256: four runs of 32 weights each
    low = np.concatenate((halves[:, :, :2] & 15 | (halves[:, :, 2:] & 15) << 4,), axis=-1).reshape(-1, 128)
    high = np.bitwise_or.reduce(halves >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(-1, 64)
    return np.concatenate((low, high, s.astype(np.int8).view(np.uint8), _bytes(big_d)), axis=1)
