"""Messages from one process to several others of this machine, through shared memory.

    one word      bytes written so far, in all                          the writer's
    a page each   bytes read, steps done, last words                    a reader's
    the ring      frames: length, checksum, whether more follows; bytes

The memory is a memfd that the readers inherit, so nothing is left of it when all have ended. A reader spins for a
moment and then sleeps on an eventfd of its own. Nothing here depends on the order in which a processor lets others see
what it writes: a frame's checksum is of its bytes and its place, so one that is not all there yet is not taken for one
that is.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Self
from zlib import crc32

from gpu.shared_memory import allocate

CAPACITY = 4 * 2**20  # bytes
SPIN_SECONDS = 250e-6  # about what an engine does between two steps; waking up takes 50 to 100 µs
ROOM_SECONDS = 100e-6  # between two looks at whether the slowest reader has made room
LONGEST_MESSAGE = 2**30  # bytes: what is longer is a mistake
TORN_SECONDS = 10.0  # after which a frame that is still not whole never will be

_PAGE = 4096
_HEAD = 0  # words of the first page
_ABANDONED, _STOPPED, _CHECKED = 8, 16, 24  # each on a cache line of its own
_TAIL, _STEPS = 0, 8  # words of a reader's page
_WORDS_OF_A_PAGE = _PAGE // 8
_LAST_WORDS, _MOST_LAST_WORDS = 1024, 2048  # bytes of a reader's page
_FRAME = struct.Struct("<IIB")
FRAME_BYTES = _FRAME.size  # of a message that is at most half as long as the ring


class _Shared:
    """The memory, as both sides see it."""

    def __init__(self, memory: int, num_readers: int) -> None:
        self._map = mmap.mmap(memory, 0)
        start = _PAGE * (1 + num_readers)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:start].cast("Q")
        self._ring = self._bytes[start:]

    def _spans(self, position: int, length: int) -> tuple[slice, slice]:
        """Where so many bytes from a position on lie: up to the end, and from the beginning."""
        start = position % len(self._ring)
        end = min(start + length, len(self._ring))
        return slice(start, end), slice(0, length - (end - start))

    # Whether a step is still wanted. The driver writes the first, the first rank the others.

    @property
    def abandoned(self) -> int:
        """The latest step that nobody wants any more."""
        return self._words[_ABANDONED]

    @abandoned.setter
    def abandoned(self, step: int) -> None:
        self._words[_ABANDONED] = step

    @property
    def stopped(self) -> int:
        """The latest of these checks at which the first rank broke a step off: the others of its stage do so at theirs
        of the same number."""
        return self._words[_STOPPED]

    @stopped.setter
    def stopped(self, number: int) -> None:
        self._words[_STOPPED] = number

    @property
    def checked(self) -> int:
        """How many times the first rank has checked whether a step is still wanted."""
        return self._words[_CHECKED]

    @checked.setter
    def checked(self, number: int) -> None:
        self._words[_CHECKED] = number


class RingWriter(_Shared):
    """The one that writes. Not thread-safe. `descriptors` are for each reader's process to inherit."""

    def __init__(self, num_readers: int, capacity: int = CAPACITY) -> None:
        memory = os.memfd_create("headrace-ring")
        allocate(memory, _PAGE * (1 + num_readers) + capacity)
        self._adopt(memory, [os.eventfd(0) for _ in range(num_readers)])

    @classmethod
    def inherited(cls, memory: int, wakers: list[int]) -> Self:
        """One that another process has made, and to which it does not write."""
        writer = cls.__new__(cls)
        writer._adopt(memory, wakers)
        return writer

    def _adopt(self, memory: int, wakers: list[int]) -> None:
        super().__init__(memory, len(wakers))
        self._memory, self._wakers = memory, wakers
        self._head = 0

    @property
    def all_descriptors(self) -> tuple[int, list[int]]:
        """For a process that is to write in place of this one."""
        return self._memory, self._wakers

    def descriptors(self, reader: int) -> tuple[int, int]:
        """The memory's and the reader's waker's."""
        return self._memory, self._wakers[reader]

    def write(self, message: bytes | memoryview, check: Callable[[], None] = lambda: None) -> None:
        """Give a message, of any length, to all readers.

        Waits while there is no room; `check`, asked meanwhile, may raise when a reader has gone.
        """
        rest = memoryview(message)
        longest = len(self._ring) // 2 - _FRAME.size
        while True:
            piece, rest = rest[:longest], rest[longest:]
            while self._room() < _FRAME.size + len(piece):
                check()
                time.sleep(ROOM_SECONDS)
            checksum = crc32(piece, self._head & 0xFFFFFFFF)
            self._put(_FRAME.pack(len(piece), checksum, bool(rest)))
            self._put(piece)
            self._words[_HEAD] = self._head
            for waker in self._wakers:
                os.eventfd_write(waker, 1)
            if not rest:
                return

    def steps(self, reader: int) -> int:
        """How many steps it has counted."""
        return self._words[_WORDS_OF_A_PAGE * (1 + reader) + _STEPS]

    def last_words(self, reader: int) -> str:
        """What it has left behind; to be asked when it has ended."""
        start = _PAGE * (1 + reader) + _LAST_WORDS
        return bytes(self._bytes[start : start + _MOST_LAST_WORDS]).rstrip(b"\0").decode("utf-8", "replace")

    def close(self) -> None:
        """Let go of the descriptors; the memory is gone when all have."""
        for descriptor in (self._memory, *self._wakers):
            os.close(descriptor)

    def _room(self) -> int:
        readers = range(1, len(self._wakers) + 1)
        slowest = min(self._words[_WORDS_OF_A_PAGE * reader + _TAIL] for reader in readers)
        return len(self._ring) - (self._head - slowest)

    def _put(self, data: bytes | memoryview) -> None:
        first, second = self._spans(self._head, len(data))
        split = first.stop - first.start
        self._ring[first], self._ring[second] = data[:split], data[split:]
        self._head += len(data)


class RingReader(_Shared):
    """One that reads all that was written since the ring was made. Not thread-safe."""

    def __init__(self, memory: int, waker: int, reader: int, num_readers: int) -> None:
        super().__init__(memory, num_readers)
        os.close(memory)
        self._waker = waker
        self._page = _WORDS_OF_A_PAGE * (1 + reader)
        self._tail = 0

    @property
    def has_message(self) -> bool:
        """Whether `read` would find one, or the beginning of one."""
        return self._words[_HEAD] > self._tail

    def read(self) -> bytes:
        """The next message. Waits for it as long as it takes; who has to end meanwhile is told so on another way."""
        message = bytearray()
        while True:
            self._wait()
            piece, has_more = self._take_frame()
            message += piece
            if not has_more:
                return bytes(message)
            if len(message) > LONGEST_MESSAGE:
                raise ValueError(f"a message of more than {LONGEST_MESSAGE} bytes")

    def count_step(self) -> None:
        """Tell that one more step is over."""
        self._words[self._page + _STEPS] += 1

    def leave_words(self, text: str) -> None:
        """Tell what this process ends of."""
        data = text.encode("utf-8", "replace")[:_MOST_LAST_WORDS]
        start = 8 * self._page + _LAST_WORDS
        self._bytes[start : start + len(data)] = data

    def _wait(self) -> None:
        until = time.monotonic() + SPIN_SECONDS
        while self._words[_HEAD] <= self._tail:
            if time.monotonic() < until:
                os.sched_yield()  # who writes may be waiting for this very core
            else:
                os.eventfd_read(self._waker)

    def _take_frame(self) -> tuple[bytes, bool]:
        until = time.monotonic() + TORN_SECONDS
        while True:
            available = self._words[_HEAD] - self._tail
            length, checksum, has_more = _FRAME.unpack(self._get(self._tail, _FRAME.size))
            if length <= available - _FRAME.size:
                piece = self._get(self._tail + _FRAME.size, length)
                if crc32(piece, self._tail & 0xFFFFFFFF) == checksum:
                    self._tail += _FRAME.size + length
                    self._words[self._page + _TAIL] = self._tail
                    return piece, bool(has_more)
            if time.monotonic() > until:
                raise ValueError("a frame of the ring is damaged")
            os.sched_yield()

    def _get(self, position: int, length: int) -> bytes:
        first, second = self._spans(position, length)
        return bytes(self._ring[first]) + bytes(self._ring[second])
