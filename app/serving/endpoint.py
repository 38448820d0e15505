"""Handlers as ASGI applications: a request scope, accounting, background requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.middleware import Access
from app.http.scope import Handler, RequestScope
from app.observability.logs import log_request
from app.runtime import in_steps, weight_so_far
from app.serving.response_store import EventLog
from app.serving.server import Server
from engine.fairness import current_tenant
from engine.frontend.request_stream import RequestStream
from engine.messages import RequestOutput
from protocol.answers import CONTENT_TYPE, KEEP_ALIVE, event_frame
from protocol.errors import ApiError

CLIENT_GONE = 499  # logged and counted, never sent: nginx's code for a client that closed the connection


class Endpoint:
    """An ASGI application that runs `handler` for one route. `route` is the path's template, for metrics and traces.

    Quiet endpoints (probes, metrics) are counted but not logged, and a drain does not wait for them. `access` is the
    key that `app.http.middleware.Authentication` requires. With `reads_body` the handler reads the body itself.
    """

    def __init__(
        self,
        server: Server,
        route: str,
        handler: Handler,
        *,
        quiet: bool = False,
        access: Access = Access.CLIENT,
        reads_body: bool = False,
    ) -> None:
        self._reads_body = reads_body
        self.access = access
        self._server = server
        self._route = route
        self._handler = handler
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        request = RequestScope(scope, receive, send, server.settings, server.bodies)
        request.reads_body = self._reads_body
        current_tenant.set(request.tenant.name)
        request.tenant_headers = partial(server.rates.headers, request.tenant)
        try:
            await run_and_account(server, request, self._route, self._handler, quiet=self._quiet)
        finally:
            server.metrics.on_http_request(self._route, request.method, _status(request))


async def run_and_account(
    server: Server, request: RequestScope, route: str, handler: Handler, *, quiet: bool = False
) -> None:
    """Run `handler` in the scope of `request`, then write the log line, the timeline and the trace."""

    async def run() -> None:
        server.enter(request, quiet=quiet)
        if not quiet and request.method in ("POST", "DELETE"):  # others ask about the server, such as /v1/models
            server.tracer.begin(request, route)
        try:
            await request.run(handler)
        finally:
            server.leave(request)
            _account(server, request, route, quiet=quiet)

    on_hold = server.metrics.on_loop_hold
    await in_steps(run(), lambda seconds: on_hold(seconds, route, request.request_id))


def _account(server: Server, request: RequestScope, route: str, *, quiet: bool) -> None:
    status = _status(request)
    record = request.record(route=route, model=request.model or server.settings.model_names[0], status=status)
    if request.outputs is not None:
        server.timelines.keep(request, status, record.ended_time)
    server.tracer.end(request, record)
    if not quiet:
        tokens = record.num_prompt_tokens or 0, record.num_output_tokens or 0
        server.metrics.on_tenant(request.tenant.name, status, *tokens)
    if server.settings.log_requests and not quiet:
        log_request(record)


def _status(request: RequestScope) -> int:
    return request.status if request.status is not None else CLIENT_GONE


def refuse_with(server: Server) -> Callable[[ApiError], ASGIApp]:
    """Return a function that turns an error into an ASGI application, which sends it without reading the body.

    The application neither logs nor counts, because it answers clients without a key. It has a scope, so that a client
    that does not read the answer is disconnected.
    """

    def refuse(error: ApiError) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = RequestScope(scope, receive, send, server.settings, server.bodies)
            server.enter(request, quiet=True)
            try:
                await request.refuse(error)
            finally:
                server.leave(request)

        return answer

    return refuse


# ----------------------------------------------------------------------------------------------------------- background
# Requests that outlive their connection. A background response has a scope like any other request, with a deadline, a
# queue slot, a tenant and figures; but it runs in the server's task group, and its client is an `EventLog`, which
# never disconnects and reads at any speed. Clients follow the log from any connection and at their own speed.


logger = logging.getLogger(__name__)

# Seconds after which a background request is answered as begun: long enough to read, tokenize and refuse it on a busy
# machine, so that a wrong request is answered with an error.
ACCEPTED_WITHIN = 5.0

Fail = Callable[[ApiError, Iterable[RequestOutput]], bytes]
"""A function that returns the last events of a response that failed; see `StreamWriter.fail_stream`."""


class BackgroundScope(RequestScope):
    """The scope of a background response, which goes on without the connection of its request.

    `failure` is the error that ended it, if it failed.
    """

    __slots__ = ("_accepted", "_fail", "_log", "_write", "failure")

    def __init__(self, server: Server, request: RequestScope, log: EventLog, fail: Fail) -> None:
        super().__init__(request.asgi_scope, self._receive_body, self._feed, server.settings, server.bodies)
        self.body = request.body
        self.model = request.model
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
        """Start the response, and wait until it is accepted, or at most ACCEPTED_WITHIN seconds.

        Raises the ApiError of a refusal. Later errors are events of its log.
        """

        async def run() -> None:
            try:
                await run_and_account(server, self, route, handler)
            except Exception:  # a bug in one response must not end the server
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
        """Do nothing: an event log always reads, and needs no keep-alive."""

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
    """Answer with the events of the log from this number on, and with later ones as they come.

    Raises ApiError 404 if events were dropped.
    """
    events, number = log.read(number)
    request.follows_another = True

    async def fail(error: ApiError) -> bytes:
        return _error_event(error, number)

    await request.start_stream(
        CONTENT_TYPE, error_frame=fail, keep_alive=(server.settings.sse_keep_alive or math.inf, KEEP_ALIVE)
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
