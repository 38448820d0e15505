"""The ranks of one machine over a shared segment of memory, which csrc/ranks.h describes.

The process that starts the ranks makes a segment and passes its descriptor to all of them. Values are added in the
ranks' order, so results do not depend on timing; those of the C++ decoder do not depend on the number of ranks either.
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

TIMEOUT = 60.0  # seconds; long, because ranks that stopped or ended are usually found earlier by other means


def make_segment() -> int:
    """Return a descriptor of memory for one group of ranks. The memory lives as long as a descriptor or a mapping."""
    return os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)


class SharedMemoryCommunicator:
    """One of `size` ranks, for one thread at a time. All ranks make the same calls in the same order.

    A call raises RankLost if a rank does not join it within `timeout` seconds or was declared lost; every later call
    then raises it, too. The error has the lost rank's number in the world; `first` is that of this group's first rank.
    A process is in one group.
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
            raise MemoryError("not enough memory for the communicator of a rank")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._functions.hr_ranks_destroy(self.handle)
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def barrier(self) -> None:
        self._functions.hr_barrier(self.handle)

    def all_reduce_(self, values: NDArray[np.float32]) -> None:
        """Replace contiguous `values` by their sums over all ranks, the same bits on each."""
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        self._functions.hr_all_reduce(self.handle, values.ctypes.data, values.size)

    def all_gather(self, values: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float32]:
        """Concatenate the values of all ranks, [sizes[rank]] of each -> [sum of sizes]."""
        assert values.dtype == np.float32
        assert values.size == sizes[self.rank]
        assert values.flags.c_contiguous
        gathered = np.empty(sum(sizes), dtype=np.float32)
        num_bytes = np.array(sizes, dtype=np.int64) * gathered.itemsize
        self._functions.hr_all_gather(self.handle, values.ctypes.data, num_bytes.ctypes.data, gathered.ctypes.data)
        return gathered

    def lose(self, rank: int) -> None:
        """Declare `rank` lost, which ends every wait of the group at once. May be called from any thread."""
        self._functions.hr_lose(self._segment.ctypes.data, rank)

    def room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that all ranks share. Each rank calls it once, with the same size. Raises HeadraceError if the
        system has not enough."""
        return self._map(self._header, _pages(num_bytes))

    def _map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        allocate(self._descriptor, num_bytes, offset)  # every rank does
        return np.frombuffer(mmap.mmap(self._descriptor, num_bytes, offset=offset), np.uint8)


def segment_bytes(library: Library, size: int) -> int:
    """Return the bytes that `size` ranks need for their synchronization. Raises ConfigError for too many ranks."""
    num_bytes: int = library.functions.hr_segment_bytes(size)
    if num_bytes < 0:
        raise ConfigError("tensor_parallel_size", size, allowed="a machine has at most 64 ranks", hint="64 works")
    return num_bytes


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
