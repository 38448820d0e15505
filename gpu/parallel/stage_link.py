"""Activations, from the ranks of a stage to those of the next: through a ring, as plans have one, or sockets.

The first tensor rank of a stage writes, all of the next read: each rank of a stage has the whole residual stream. There
is one message for every step that runs, also for one that came to nothing, so that no stage waits for what never comes.

And none waits for room: a link has as much as all steps in flight need. So a rank waits only for what others make of
messages that all of them can read to their end, or for the rest of a message, and then it makes room on the driver's
ring. A rank that waited for the stage behind it would keep a long message from that one, and both for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import StepAbandoned
from gpu.parallel.ring import FRAME_BYTES
from gpu.runner import StageLinks

_HEAD = struct.Struct("<qB")
_STATES, _FAILED, _ABANDONED = range(3)


def link_bytes(num_steps: int, num_tokens: int, hidden_size: int) -> int:
    """How long a link is for so many steps in flight, two at least, of so many tokens each."""
    return num_steps * (FRAME_BYTES + _HEAD.size + num_tokens * hidden_size * np.dtype(np.float32).itemsize)


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
            self._write(_ABANDONED if isinstance(error, StepAbandoned) else _FAILED)

    def _send(self, hidden: NDArray[np.float32]) -> None:
        self._write(_STATES, np.ascontiguousarray(hidden, np.float32).tobytes())

    def _write(self, kind: int, data: bytes = b"") -> None:
        self._has_sent = True
        if self._after is not None:
            self._after.write(_HEAD.pack(self._number, kind) + data, _raise_no_room)

    def _receive(self, num_tokens: int) -> NDArray[np.float32]:
        kind, message = self._read()
        if kind == _ABANDONED:
            raise StepAbandoned("the first stage has found that nobody wants this step")
        if kind == _FAILED:
            raise RuntimeError("the stage before this one has failed")
        return np.frombuffer(message, np.float32, offset=_HEAD.size).reshape(num_tokens, -1)

    def _read(self) -> tuple[int, bytearray]:
        assert self._before is not None
        self._has_received = True
        message = bytearray(self._before.read())
        number, kind = _HEAD.unpack_from(message)
        assert number == self._number
        return kind, message


def _raise_no_room() -> None:
    raise RuntimeError("more steps are in flight than a link has room for")
