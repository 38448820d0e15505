"""Memory that is read from end to end in every step, in large pages where the kernel has them.

With pages of 4 KiB each tile of the KV cache is a page of its own, and finding it costs as much as reading it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes: a cache line, and one vector of the library
_CHUNK = 32 * 2**20


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed uint8 [num_bytes], aligned to a page. It is taken from the system when it is first written."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


class WeightBuffer:
    """Hands out pieces of larger pieces of memory, for what stays as long as the model."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeroed uint8 [num_bytes], aligned to ALIGNMENT. It keeps all of its chunk alive."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = zeros(max(_CHUNK, num_bytes)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece
