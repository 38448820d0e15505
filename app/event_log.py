"""The events of a response that is made in the background, for readers who come and go.

What the stream's writer makes is appended as it comes; whoever reads has a place of its own, and asks for what is
behind it. Nobody waits for a reader: one that lags too far behind finds its events gone. Belongs to the event loop, but
for `forget`, which any thread may call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import anyio

from protocol.errors import ApiError

READ_AT_ONCE = 2**15  # bytes, about: of a long log, a reader takes one piece after the other
_END = b"\n\n"  # of an event; JSON has no raw line breaks
_OVERHEAD = 150  # bytes of a piece beside its events


class EventLog:
    """Events, numbered from 0 in the order of their `sequence_number`.

    `on_growth` is told by how many bytes it has grown; `num_bytes` is theirs who do the accounting.
    """

    def __init__(self) -> None:
        self.on_growth: Callable[[int], None] = lambda num_bytes: None
        self.abandoned = anyio.Event()  # whoever makes the response shall not go on
        self.is_over = False  # nothing more will come
        self.is_forgotten = False
        self.num_bytes = 0
        self.next_number = 0
        self._pieces: list[tuple[int, bytes]] = []  # events as they came, after the number of the first of them
        self._error: ApiError | None = None
        self._grown = anyio.Event()

    def append(self, frames: bytes) -> None:
        """Add the next events."""
        if not frames:
            return
        piece = (self.next_number, frames)
        self.next_number += frames.count(_END)
        if self.is_forgotten:
            self._pieces = [piece]  # for those who follow it still
        else:
            self._pieces.append(piece)
            self.on_growth(len(frames) + _OVERHEAD)
        self._wake()

    def end(self, error: ApiError | None = None) -> None:
        """Nothing more will come. `error` is what readers are told who have read everything. Idempotent."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._wake()

    def abandon(self, error: ApiError) -> None:
        """Nobody wants the response any more. `error` is what readers are told."""
        self.end(error)
        self.abandoned.set()

    def forget(self) -> None:
        """Free the memory. Who follows gets what is appended from now on."""
        self.is_forgotten, self._pieces, self.num_bytes = True, [], 0

    def forget_oldest(self, num_bytes: int) -> int:
        """Free so many bytes at least, if there are as many beside the latest piece. Returns how many it were."""
        freed = count = 0
        while freed < num_bytes and count < len(self._pieces) - 1:
            freed += len(self._pieces[count][1]) + _OVERHEAD
            count += 1
        del self._pieces[:count]
        self.num_bytes -= freed
        return freed

    def read(self, number: int) -> tuple[bytes, int]:
        """Events from this number on, and the number behind them; none if there are none yet.

        Raises what the log has ended with when there is nothing more, and ApiError 404 if they are gone.
        """
        pieces = self._pieces
        place = bisect_right(pieces, number, key=lambda piece: piece[0]) - 1
        if number < self.next_number and place < 0:
            gone = ApiError(404, f"The events before number {self._first} are not kept any more.", code="not_found")
            raise self._error or gone
        found: list[bytes] = []
        size = 0
        for at in range(max(place, 0), len(pieces)):
            first, frames = pieces[at]
            unread = _without(frames, number - first) if first < number else frames
            found.append(unread)
            size += len(unread)
            number = max(number, pieces[at + 1][0] if at + 1 < len(pieces) else self.next_number)
            if size >= READ_AT_ONCE:
                break
        if not size and self._error is not None:
            raise self._error
        return b"".join(found), number

    async def wait(self, number: float) -> None:
        """Wait until the event of this number is there, or nothing more will come."""
        while self.next_number <= number and not self.is_over:
            await self._grown.wait()

    @property
    def _first(self) -> int:
        return self._pieces[0][0] if self._pieces else self.next_number

    def _wake(self) -> None:
        self._grown.set()
        self._grown = anyio.Event()


def _without(frames: bytes, count: int) -> bytes:
    """The events behind the first `count` of them."""
    start = 0
    for _ in range(count):
        start = frames.find(_END, start) + len(_END)
        if start < len(_END):  # there are not so many
            return b""
    return frames[start:]
