"""The ASGI applications behind all paths: a handler in a request scope with the accounting of each request afterwards,
and the refusal of what no handler takes, in a scope as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from app.event_loop import in_steps
from app.logs import log_request
from app.middleware import Access
from app.request_record import record_of
from app.scope import Handler, RequestScope
from app.server import Server
from engine.frontend.fair_threads import current_tenant
from protocol.errors import ApiError

CLIENT_GONE = 499  # logged and counted, never sent: nginx's code for a client that closed the connection


class Endpoint:
    """Runs `handler` for one route. `route` is the path's template, which metrics and traces go by.

    Quiet endpoints (probes, metrics) are counted but not logged, and a drain does not wait for them. `access` is the
    key that `app.middleware.Authentication` asks for.
    """

    def __init__(
        self, server: Server, route: str, handler: Handler, *, quiet: bool = False, access: Access = Access.CLIENT
    ) -> None:
        self.access = access
        self._server = server
        self._route = route
        self._handler = handler
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        request = RequestScope(scope, receive, send, server.settings, server.bodies)
        current_tenant.set(request.tenant.name)
        try:
            await run_and_account(server, request, self._route, self._handler, quiet=self._quiet)
        finally:
            server.metrics.on_http_request(self._route, request.method, _status(request))


async def run_and_account(
    server: Server, request: RequestScope, route: str, handler: Handler, *, quiet: bool = False
) -> None:
    """Run `handler` in the scope of `request`; afterwards, log line, timeline and trace."""

    async def run() -> None:
        server.enter(request, quiet=quiet)
        if not quiet:
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
    record = record_of(request, route=route, model=server.settings.model_names[0], status=status)
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


class Refusal:
    """Answers every request with `error`, without reading its body. Neither logged nor counted, as anybody may ask for
    it; but in a scope, so that a client that does not read the answer is cut like any other."""

    def __init__(self, server: Server, error: ApiError) -> None:
        self._server = server
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = RequestScope(scope, receive, send, self._server.settings, self._server.bodies)
        self._server.enter(request, quiet=True)
        try:
            await request.refuse(self._error)
        finally:
            self._server.leave(request)


def refuse_with(server: Server) -> Callable[[ApiError], ASGIApp]:
    """Makes a `Refusal` of an error."""
    return partial(Refusal, server)
