"""The ranks of one machine over a shared segment: csrc/ranks.h has its words, its promises and its waits.

Whoever starts the ranks makes a segment and hands its descriptor to all of them. Sums are added up in the ranks' order,
so results depend on no timing; with the library's decoder, not on the number of ranks either.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from gpu.cpu.library import Library
from gpu.host import allocate

TIMEOUT = 60.0  # seconds: of a rank that nobody has found to be stopped or gone, so rather long


def make_segment() -> int:
    """A descriptor of memory for the ranks of one group, which is gone with its last descriptor and mapping."""
    return os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)


class SharedMemoryCommunicator:
    """One of `size` ranks, for one thread at a time. All make the same calls in the same order.

    Each raises RankLost if a rank does not come within `timeout` seconds, or is said to be lost: for good. It is
    named as the world counts, where this group's first rank is number `first`. A process is in one group.
    """

    def __init__(
        self, library: Library, descriptor: int, rank: int, size: int, timeout: float = TIMEOUT, first: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        library.first_rank = first
        self._functions = library.functions
        self._descriptor = os.dup(descriptor)
        self._header = _pages(segment_bytes(library, size))
        self._segment = self._map(0, self._header)
        self.handle = self._functions.hr_ranks_create(self._segment.ctypes.data, rank, size, timeout)
        if self.handle is None:
            raise MemoryError("there is no memory for a rank")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._functions.hr_ranks_destroy(self.handle)
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._functions.hr_barrier(self.handle)

    def all_reduce_(self, values: NDArray[np.float32]) -> None:
        """Contiguous `values` become the sums over all ranks, the same bits on each."""
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        self._functions.hr_all_reduce(self.handle, values.ctypes.data, values.size)

    def all_gather(self, values: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float32]:
        """[sizes[rank]] of each -> [sum of sizes], in the ranks' order."""
        assert values.dtype == np.float32
        assert values.size == sizes[self.rank]
        assert values.flags.c_contiguous
        gathered = np.empty(sum(sizes), dtype=np.float32)
        num_bytes = np.array(sizes, dtype=np.int64) * gathered.itemsize
        self._functions.hr_all_gather(self.handle, values.ctypes.data, num_bytes.ctypes.data, gathered.ctypes.data)
        return gathered

    def lose(self, rank: int) -> None:
        """End every wait of the group, at once: `rank` will not come any more. From any thread."""
        self._functions.hr_lose(self._segment.ctypes.data, rank)

    def room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of all ranks, which ask for as much, once. Raises HeadraceError if there is none."""
        return self._map(self._header, _pages(num_bytes))

    def _map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        allocate(self._descriptor, num_bytes, offset)  # all do
        return np.frombuffer(mmap.mmap(self._descriptor, num_bytes, offset=offset), np.uint8)


def segment_bytes(library: Library, size: int) -> int:
    """What `size` ranks need to meet. Raises ConfigError for more than there can be."""
    num_bytes: int = library.functions.hr_segment_bytes(size)
    if num_bytes < 0:
        raise ConfigError("tensor_parallel_size", size, allowed="ranks of one machine are 64 at most", hint="64 works")
    return num_bytes


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
