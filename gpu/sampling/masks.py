"""Token masks: what a row may sample at all. The sampler imports it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import TokenMasks

# What eight tokens' bits, read as a number, add to their logits.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, np.float32(0), -np.inf
).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LogitsMask:
    """For some rows of the logits, the tokens that are allowed. M rows."""

    rows: NDArray[np.int64]  # [M], into the logits
    # [M, words]: token t is allowed where bit t % 32 of word t // 32 is set; in bytes, bit t % 8 of byte t // 8.
    bits: NDArray[np.uint32] | NDArray[np.uint8]


def logits_mask(masks: TokenMasks, plan_indices: NDArray[np.int64]) -> LogitsMask | None:
    """The masks of some logits, given each row's request as its index in the plan; None if no row has one."""
    rows = np.flatnonzero(np.isin(plan_indices, masks.indices))
    if len(rows) == 0:
        return None
    return LogitsMask(rows=rows, bits=masks.bits[np.searchsorted(masks.indices, plan_indices[rows])])


def apply_mask(logits: NDArray[np.float32], mask: LogitsMask) -> None:
    """Set the logits ([S, vocab]) of tokens that are not allowed to -inf, in place. Tokens beyond the bits are not.

    Eight tokens are looked up at a time and added: 12 µs for a row of 49,152, where a boolean fill takes up to 200.
    """
    tokens = mask.bits.view(np.uint8)
    addends = np.empty((tokens.shape[1], 8), dtype=np.float32)
    covered = min(addends.size, logits.shape[1])
    for row, bits in zip(mask.rows.tolist(), tokens, strict=True):
        np.take(_ADDENDS, bits, axis=0, out=addends, mode="clip")  # any other mode makes a copy
        logits[row, :covered] += addends.reshape(-1)[:covered]
        logits[row, covered:] = -np.inf
