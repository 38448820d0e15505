"""Requests that outlive their connection: a scope whose client is an event log.

A response that is made in the background has a scope like any other request, with its deadline, its place in the queue,
its tenant, its figures; but it runs in the server's own task group, and what it sends goes into an `EventLog`, which is
always there and reads at any speed. Whoever wants to see it follows the log, from any connection and at its own pace.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import anyio

from app.endpoint import run_and_account
from app.event_log import EventLog
from app.scope import Handler, RequestScope
from app.server import Server
from app.workload import weight_so_far
from engine.frontend.request_stream import RequestStream
from engine.messages import RequestOutput
from protocol.errors import ApiError
from protocol.sse import CONTENT_TYPE, KEEP_ALIVE, event_frame

logger = logging.getLogger(__name__)

# Seconds until it is told that it has begun: long enough to read, tokenize and refuse it on a busy machine, so that
# what is wrong at once is told in plain words.
ACCEPTED_WITHIN = 5.0

Fail = Callable[[ApiError, Iterable[RequestOutput]], bytes]
"""Makes the last events of a response that cannot go on; see `StreamWriter.fail_stream`."""


class BackgroundScope(RequestScope):
    """A request that has come on another's connection and goes on without it.

    `failure` is what it ended with, if it failed.
    """

    __slots__ = ("_accepted", "_fail", "_log", "_write", "failure")

    def __init__(self, server: Server, request: RequestScope, log: EventLog, fail: Fail) -> None:
        super().__init__(request.asgi_scope, self._receive_body, self._feed, server.settings, server.bodies)
        self.body = request.body
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.marks = request.marks[:1]
        self.span = request.span
        self.connection = None
        self.failure: ApiError | None = None
        self._log = log
        self._fail = fail
        self._write = server.workload.write
        self._accepted = anyio.Event()

    async def begin(self, server: Server, route: str, handler: Handler, when_over: Callable[[], None]) -> None:
        """Start, and wait a moment for what is wrong with the request.

        Raises the ApiError that it is refused with. What comes later, its events tell.
        """

        async def run() -> None:
            try:
                await run_and_account(server, self, route, handler)
            except Exception:  # a bug, which must not end the server
                logger.exception("A response in the background failed")
            finally:
                self._log.end()
                self._accepted.set()
                when_over()

        server.start_soon(run)
        with anyio.move_on_after(ACCEPTED_WITHIN):
            await self._accepted.wait()
        if self.failure is not None and self.outputs is None:
            raise self.failure

    def attend(self, outputs: RequestStream) -> None:
        super().attend(outputs)
        self._accepted.set()

    @property
    def progress(self) -> str:
        is_scheduled = self.outputs is not None and self.outputs.first_scheduled_time is not None
        return "in_progress" if is_scheduled else "queued"

    @property
    def takes_more(self) -> bool:
        return self.status is not None and not self._answered

    def send_chunk_now(self, data: bytes) -> None:
        self._log.append(data)

    def tick(self, now: float) -> None:
        """Its client always reads, and needs no sign of life."""

    async def _send_error(self, error: ApiError) -> None:
        self.failure, self.status, self._answered = error, error.status, True
        unsent = self.outputs.drain() if self.outputs is not None else ()
        self._log.append(await self._write(weight_so_far(self.outputs), lambda: self._fail(error, unsent)))

    async def _send_pieces(self, data: bytes, *, more_body: bool) -> None:
        self._log.append(data)

    async def _receive_body(self) -> dict[str, Any]:
        if self.received_time is None:
            return {"type": "http.request", "body": self.body}
        await self._log.abandoned.wait()
        return {"type": "http.disconnect"}

    async def _feed(self, message: Any) -> None:
        self._log.append(message.get("body", b""))


async def follow(server: Server, request: RequestScope, log: EventLog, number: int) -> None:
    """Answer with the events from this number on, those that are there and those that come.

    Raises ApiError 404 if they are gone.
    """
    events, number = log.read(number)
    request.follows_another = True

    async def fail(error: ApiError) -> bytes:
        return _error_event(error, number)

    await request.start_stream(
        CONTENT_TYPE,
        error_frame=fail,
        keep_alive=(server.settings.sse_keep_alive or math.inf, KEEP_ALIVE),
    )
    while events or not log.is_over:
        if events:
            await request.send_chunk(events)
        else:
            await log.wait(number)
        events, number = log.read(number)
    await request.end_stream(b"")


def _error_event(error: ApiError, number: int) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": number}
    return event_frame("error", {"type": "error", **fields})
