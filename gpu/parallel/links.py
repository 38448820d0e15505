"""Rings in shared memory, and links between pipeline stages.

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
from typing import Protocol, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.errors import StepAbandoned
from gpu.host import allocate
from gpu.runner.runner import StageLinks

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


# ----------------------------------------------------------------------------------------------------------- stage link
# Activations, from the ranks of a stage to those of the next: through a ring, as plans have one, or sockets.
#
# The first tensor rank of a stage writes, all of the next read: each rank of a stage has the whole residual stream.
# There is one message for every step that runs, also for one that came to nothing, so that no stage waits for what
# never comes.
#
# And none waits for room: a link has as much as all steps in flight need. So a rank waits only for what others make of
# messages that all of them can read to their end, or for the rest of a message, and then it makes room on the driver's
# ring. A rank that waited for the stage behind it would keep a long message from that one, and both for ever.


_STAGE_LINK_HEAD = struct.Struct("<qB")
_STATES, _FAILED, _STAGE_LINK_ABANDONED = range(3)


def link_bytes(num_steps: int, num_tokens: int, hidden_size: int) -> int:
    """How long a link is for so many steps in flight, two at least, of so many tokens each."""
    return num_steps * (FRAME_BYTES + _STAGE_LINK_HEAD.size + num_tokens * hidden_size * np.dtype(np.float32).itemsize)


class Reader(Protocol):
    """The end of a rank that reads: a `RingReader`, where the stages are of one machine."""

    def read(self) -> bytes: ...


class Writer(Protocol):
    """The end of the rank that writes: a `RingWriter`. `check` is asked where there is no room."""

    def write(self, message: bytes, check: Callable[[], None]) -> None: ...


class StageLink:
    """The two ends that a rank has. Not thread-safe."""

    def __init__(self, before: Reader | None, after: Writer | None, *, is_last: bool) -> None:
        """`before` is None on the first stage, `after` where another rank writes for this stage, or none does."""
        self._before = before
        self._after = after
        self._number = 0
        self._has_sent = self._has_received = True
        self.links = StageLinks(receive=None if before is None else self._receive, send=None if is_last else self._send)

    def begin(self, number: int) -> None:
        """Another step."""
        self._number, self._has_sent, self._has_received = number, False, self._before is None

    def fail(self, error: Exception) -> None:
        """The step has come to nothing here."""
        if not self._has_received:
            self._read()
        if not self._has_sent:
            self._write(_STAGE_LINK_ABANDONED if isinstance(error, StepAbandoned) else _FAILED)

    def _send(self, hidden: NDArray[np.float32]) -> None:
        self._write(_STATES, np.ascontiguousarray(hidden, np.float32).tobytes())

    def _write(self, kind: int, data: bytes = b"") -> None:
        self._has_sent = True
        if self._after is not None:
            self._after.write(_STAGE_LINK_HEAD.pack(self._number, kind) + data, _raise_no_room)

    def _receive(self, num_tokens: int) -> NDArray[np.float32]:
        kind, message = self._read()
        if kind == _STAGE_LINK_ABANDONED:
            raise StepAbandoned("the first stage has found that nobody wants this step")
        if kind == _FAILED:
            raise RuntimeError("the stage before this one has failed")
        return np.frombuffer(message, np.float32, offset=_STAGE_LINK_HEAD.size).reshape(num_tokens, -1)

    def _read(self) -> tuple[int, bytearray]:
        assert self._before is not None
        self._has_received = True
        message = bytearray(self._before.read())
        number, kind = _STAGE_LINK_HEAD.unpack_from(message)
        assert number == self._number
        return kind, message


def _raise_no_room() -> None:
    raise RuntimeError("more steps are in flight than a link has room for")
