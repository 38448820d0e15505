"""The live feed: the engine's snapshots as frames for all open pages.

1. One task queries the engine for all pages, and only while a page is open. It waits so long between two queries that
   they take at most SHARE of the engine's time.
2. A page that does not keep up misses frames. With MAX_PAGES open, a page that does not read is closed for a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import msgspec
from anyio import WouldBlock
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from app.observability.frames import MOST_REQUESTS, Service, make_frame
from app.serving.model_pool import ModelPool
from app.serving.server import ServerPhase
from engine.commands import GetSnapshot
from engine.errors import HeadraceError
from protocol.errors import ApiError

MAX_PAGES = 16
INTERVAL = 0.125  # seconds between two frames
SHARE = 0.01  # of the engine's time for snapshots
MAX_BEHIND = 16  # unread frames of a page


class Feed:
    """The pages' live feed. Owned by the server's event loop."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._pages: set[MemoryObjectSendStream[bytes]] = set()
        self._is_running = False

    @contextmanager
    def page(self) -> Iterator[MemoryObjectReceiveStream[bytes]]:
        """Provide server-sent events, each a frame of one engine, until the server stops. Raises ApiError 429, and
        503 while there is no engine."""
        _ = self._pool.model
        if len(self._pages) == MAX_PAGES and not self._drop_unread():
            raise ApiError(429, f"{MAX_PAGES} dashboards are open already; close one.", code="too_many_pages")
        send, receive = anyio.create_memory_object_stream[bytes](MAX_BEHIND)
        self._pages.add(send)
        if not self._is_running:
            self._is_running = True
            self._pool.server.start_soon(self._run)
        try:
            yield receive
        finally:
            self._pages.discard(send)
            send.close()
            receive.close()

    def _drop_unread(self) -> bool:
        """Close one page that does not read, with MAX_BEHIND unread frames. Return False if there is none."""
        for page in self._pages:
            if page.statistics().current_buffer_used == MAX_BEHIND:
                self._pages.discard(page)
                page.close()
                return True
        return False

    async def _run(self) -> None:
        from sse_starlette.event import ServerSentEvent  # imported late, for a fast start of the server

        latest: dict[int, int] = {}  # by engine: the last step that was sent
        after = 0.0
        with suppress(ApiError):
            self._pool.current.metrics.take_recent()  # drop events from before
        while self._pages and self._pool.server.phase is ServerPhase.READY:
            try:
                model = self._pool.current
                snapshots = await model.model.llm.query(GetSnapshot(after, MOST_REQUESTS))
            except (HeadraceError, ApiError):
                break
            first_tokens, refused = model.metrics.take_recent()
            service: Service | None = {"first_tokens": first_tokens, "refused": refused}
            for engine, state in snapshots.items():
                # A restarted engine counts from 0.
                sent = latest.get(engine, 0) if latest.get(engine, 0) <= state.num_steps + 2 else 0
                frame = make_frame(state, engine=engine, after_step=sent, service=service)
                latest[engine] = state.steps[-1].step if state.steps else sent
                service = None
                self._send(ServerSentEvent(msgspec.json.encode(frame).decode(), event="frame", sep="\n").encode())
            after = min((state.time for state in snapshots.values()), default=0.0)
            await anyio.sleep(max(INTERVAL, max((each.seconds for each in snapshots.values()), default=0.0) / SHARE))
        self._is_running = False
        while self._pages:
            self._pages.pop().close()

    def _send(self, data: bytes) -> None:
        for page in self._pages:
            try:
                page.send_nowait(data)
            except WouldBlock:
                continue
