"""An answer as server-sent events, kept alive while nothing happens.

Headers go out as soon as there is something to say, or after a tenth of a second: a request that fails at once is
still answered with a plain status, and one that has to wait in the queue is not mistaken for a dead server. From then
on a comment is sent whenever nothing else was for `keep_alive` seconds, so that no proxy cuts the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from app.scope import RequestScope
from protocol.errors import ApiError
from protocol.sse import KEEP_ALIVE

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS_WITHIN = 0.1  # seconds


class EventStream:
    """Writes events to one RequestScope. Used by its handler only."""

    def __init__(
        self,
        request: RequestScope,
        *,
        keep_alive: float,
        error_frame: Callable[[ApiError], bytes],
    ) -> None:
        self._request = request
        self._keep_alive = keep_alive
        self._error_frame = error_frame
        self._last_sent = time.monotonic()
        self.started = False

    async def start(self) -> None:
        """Send the headers, and keep the connection alive from now on."""
        self.started = True
        await self._request.start_stream(CONTENT_TYPE, error_frame=self._error_frame)
        self._last_sent = time.monotonic()
        self._request.on_tick = self._keep_alive_if_silent

    async def send(self, events: bytes) -> None:
        """One or more whole events."""
        self._last_sent = time.monotonic()
        await self._request.send_chunk(events)

    @property
    def takes_more(self) -> bool:
        """Whether `send_now` may be called."""
        return self.started and self._request.takes_more

    def send_now(self, events: bytes) -> None:
        """As `send`, without waiting."""
        self._last_sent = time.monotonic()
        self._request.send_chunk_now(events)

    async def end(self, events: bytes) -> None:
        """The last events."""
        await self._request.end_stream(events)

    def _keep_alive_if_silent(self, now: float) -> None:
        # While a send waits it is not the stream that is silent but the client that does not read.
        if now - self._last_sent < self._keep_alive or self._request.is_sending:
            return
        if self.takes_more:
            self.send_now(KEEP_ALIVE)
        else:
            self._last_sent = now
            self._request.start_soon(lambda: self.send(KEEP_ALIVE))
