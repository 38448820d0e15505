"""Rings in shared memory, and links between pipeline stages.

    first page        bytes written so far, in all; flags               of the writer
    a page each       bytes read, steps done, reason of the end         of a reader
    the ring          frames: length, checksum, whether more follows; bytes

1. The memory is a memfd that the readers inherit: the kernel frees it when all processes have ended.
2. A reader spins for a moment, then sleeps on an eventfd of its own.
3. Nothing depends on the order in which processors see each other's writes: a frame's checksum covers its bytes and its
   position, so an incomplete frame is never taken for a complete one.
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
SPIN_SECONDS = 250e-6  # about the time of an engine between two steps; waking up takes 50 to 100 µs
ROOM_SECONDS = 100e-6  # between two checks whether the slowest reader has made room
LONGEST_MESSAGE = 2**30  # bytes
TORN_SECONDS = 10.0  # after which an incomplete frame counts as damaged

_PAGE = 4096
_HEAD = 0  # a word of the first page
_TAIL, _STEPS = 0, 8  # words of a reader's page
_WORDS_OF_A_PAGE = _PAGE // 8
_END_REASON, _MAX_END_REASON = 1024, 2048  # offset and size in a reader's page, bytes
_FRAME = struct.Struct("<IIB")


class _Word:
    """An attribute of a ring: a word of the first page, on a cache line of its own."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, ring: _Shared, owner: object = None) -> int:
        return ring._words[self._index]

    def __set__(self, ring: _Shared, value: int) -> None:
        ring._words[self._index] = value


class _Shared:
    """The memory of a ring, as the writer and the readers see it."""

    # The driver writes the first of these words, the first rank the others.
    abandoned = _Word(8)  # the latest step that was aborted
    stopped = _Word(16)  # the check at which rank 0 last stopped a step; other ranks stop at the same check
    checked = _Word(24)  # the number of checks by the first rank whether a step was aborted

    def __init__(self, memory: int, num_readers: int) -> None:
        self._map = mmap.mmap(memory, 0)
        start = _PAGE * (1 + num_readers)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:start].cast("Q")
        self._ring = self._bytes[start:]

    def _spans(self, position: int, length: int) -> tuple[slice, slice]:
        """Return the two slices of the ring, before and after its end, that hold `length` bytes from a position on."""
        start = position % len(self._ring)
        end = min(start + length, len(self._ring))
        return slice(start, end), slice(0, length - (end - start))


class RingWriter(_Shared):
    """The writer's side. Not thread-safe. Each reader's process inherits `memory` and one of the `wakers`."""

    def __init__(self, num_readers: int, capacity: int = CAPACITY) -> None:
        memory = os.memfd_create("headrace-ring")
        allocate(memory, _PAGE * (1 + num_readers) + capacity)
        self._adopt(memory, [os.eventfd(0) for _ in range(num_readers)])

    @classmethod
    def inherited(cls, memory: int, wakers: list[int]) -> Self:
        """Return a writer of a ring that another process made but does not write to."""
        writer = cls.__new__(cls)
        writer._adopt(memory, wakers)
        return writer

    def _adopt(self, memory: int, wakers: list[int]) -> None:
        super().__init__(memory, len(wakers))
        self.memory, self.wakers = memory, wakers
        self._head = 0

    def write(self, message: bytes | memoryview, check: Callable[[], None] = lambda: None) -> None:
        """Write a message of any length for all readers. While there is no room it waits and calls `check`, which may
        raise if a reader has ended."""
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
            for waker in self.wakers:
                os.eventfd_write(waker, 1)
            if not rest:
                return

    def steps(self, reader: int) -> int:
        """Return the number of steps that a reader has counted."""
        return self._words[_WORDS_OF_A_PAGE * (1 + reader) + _STEPS]

    def end_reason(self, reader: int) -> str:
        """Return the reason that a reader's process left before it ended; empty if it left none."""
        start = _PAGE * (1 + reader) + _END_REASON
        return bytes(self._bytes[start : start + _MAX_END_REASON]).rstrip(b"\0").decode("utf-8", "replace")

    def close(self) -> None:
        """Close the descriptors; the kernel frees the memory when all processes have."""
        for descriptor in (self.memory, *self.wakers):
            os.close(descriptor)

    def _room(self) -> int:
        readers = range(1, len(self.wakers) + 1)
        slowest = min(self._words[_WORDS_OF_A_PAGE * reader + _TAIL] for reader in readers)
        return len(self._ring) - (self._head - slowest)

    def _put(self, data: bytes | memoryview) -> None:
        first, second = self._spans(self._head, len(data))
        split = first.stop - first.start
        self._ring[first], self._ring[second] = data[:split], data[split:]
        self._head += len(data)


class RingReader(_Shared):
    """A reader of all messages since the ring was made. Not thread-safe."""

    def __init__(self, memory: int, waker: int, reader: int, num_readers: int) -> None:
        super().__init__(memory, num_readers)
        os.close(memory)
        self._waker = waker
        self._page = _WORDS_OF_A_PAGE * (1 + reader)
        self._tail = 0

    @property
    def has_message(self) -> bool:
        """True if a message, or the beginning of one, is there."""
        return self._words[_HEAD] > self._tail

    def read(self) -> bytes:
        """Return the next message. Waits without a limit: another thread ends the process if its driver ends."""
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
        """Count a finished step, for `RingWriter.steps`."""
        self._words[self._page + _STEPS] += 1

    def leave_end_reason(self, text: str) -> None:
        """Leave the reason why this process ends, for `RingWriter.end_reason`."""
        data = text.encode("utf-8", "replace")[:_MAX_END_REASON]
        start = 8 * self._page + _END_REASON
        self._bytes[start : start + len(data)] = data

    def _wait(self) -> None:
        until = time.monotonic() + SPIN_SECONDS
        while self._words[_HEAD] <= self._tail:
            if time.monotonic() < until:
                os.sched_yield()  # the writer may be waiting for this core
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
# Activations, from the ranks of a stage to those of the next, through a ring or sockets.
#
# 1. The first tensor rank of a stage writes, since all have the whole residual stream; all of the next stage read.
# 2. Every step that runs sends one message, even if it failed, so that no stage waits for a message that never comes.
# 3. No rank waits for room: a link has room for all steps in flight. If a rank waited for the next stage, it would not
#    read the rest of a long message on the driver's ring, which the next stage needs too, and both would wait for ever.


_STAGE_LINK_HEAD = struct.Struct("<qB")
_STATES, _FAILED, _STAGE_LINK_ABANDONED = range(3)


def link_bytes(num_steps: int, num_tokens: int, hidden_size: int) -> int:
    """Return the size of a link for this many steps in flight, at least two, of `num_tokens` tokens each."""
    return num_steps * (_FRAME.size + _STAGE_LINK_HEAD.size + num_tokens * hidden_size * np.dtype(np.float32).itemsize)


class Reader(Protocol):
    """The reading end of a link: a `RingReader` if the stages are on one machine."""

    def read(self) -> bytes: ...


class Writer(Protocol):
    """The writing end of a link: a `RingWriter` if the stages are on one machine. It calls `check` if there is no
    room."""

    def write(self, message: bytes, check: Callable[[], None]) -> None: ...


class StageLink:
    """The links of a rank to the stages before and after its own. Not thread-safe."""

    def __init__(self, before: Reader | None, after: Writer | None, *, is_last: bool) -> None:
        """`before` is None on the first stage. `after` is None on the last stage, and on ranks that do not write."""
        self._before = before
        self._after = after
        self._number = 0
        self._has_sent = self._has_received = True
        self.links = StageLinks(receive=None if before is None else self._receive, send=None if is_last else self._send)

    def begin(self, number: int) -> None:
        """Begin the step of this number."""
        self._number, self._has_sent, self._has_received = number, False, self._before is None

    def fail(self, error: Exception) -> None:
        """Send the failure to the next stage, after reading the message of the stage before."""
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
            raise StepAbandoned("the first stage has aborted this step")
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
