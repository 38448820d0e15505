"""The largest logit of each row. The sampler imports it.

On a CPU numpy does it: 64 rows of 49,152 float32 take 0.2 ms, where torch's max and argmax take 2.7 to 5. Rows of
bfloat16 are compared by their bits, without a float32 copy that would take longer to write than all the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

# Bit patterns of bfloat16: the lowest that is no finite positive number, and the lowest NaN with its sign bit set.
_INFINITY = np.int16(0x7F80)
_NEGATIVE_NAN = np.uint16(0xFF81)
_NEGATIVE_INFINITY = np.int16(-128)  # 0xFF80


def largest(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each row of [S, vocab], of any float dtype: int64 [S], the index of the largest logit and the lowest of
    several; and bool [S], False where the row holds NaN or +inf, or nothing but -inf."""
    if logits.device.type != "cpu":
        found = logits.max(-1)  # NaN counts as largest, so one look at the largest tells whether the row is sound
        return found.indices.cpu().numpy(), found.values.isfinite().cpu().numpy()
    if logits.dtype == torch.bfloat16:
        return _largest_by_bits(logits.view(torch.int16).numpy())
    array: NDArray[np.float32] = logits.float().numpy()
    indices = array.argmax(-1)  # as with torch, NaN counts as largest
    return indices, np.isfinite(array[np.arange(len(array)), indices])


def _largest_by_bits(bits: NDArray[np.int16]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A float's bits are a sign and a magnitude. Read as integers, positive floats are in their order, above all
    negative ones, whose order is reversed; NaN lies beyond infinity on either side. -0 counts as less than 0."""
    rows = np.arange(len(bits))
    indices = bits.argmax(-1)
    top = bits[rows, indices]
    negative = np.flatnonzero(top < 0)  # rows without a positive number, so the smallest magnitude is the largest
    if len(negative):
        indices[negative] = bits[negative].argmin(-1)
        top[negative] = bits[negative, indices[negative]]
    sound = (top < _INFINITY) & (top != _NEGATIVE_INFINITY) & (bits.view(np.uint16).max(-1) < _NEGATIVE_NAN)
    return indices, sound
