"""The state of a running server that all its models share: phase, requests, tenants, drain.

One `Server` per application, on its event loop. `app.serving.model_server` has a model, `app.serving.model_pool` all.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from app.admission.rates import RateLimits
from app.admission.tenants import Tenants
from app.config.settings import Settings
from app.http.hypercorn import ServerConnection
from app.http.listening import notify
from app.http.scope import Bodies, RequestScope
from app.observability.metrics import Metrics
from app.observability.tracing import Timelines, open_tracer
from app.runtime import Workload
from app.serving.response_store import ResponseStore
from engine.messages import FinishReason
from protocol.errors import ApiError

logger = logging.getLogger(__name__)

# The time that streams have to send their last frame after the engine has died, before the process exits.
ERROR_FRAME_SECONDS = 0.5

SHUTTING_DOWN = ApiError(
    503, "The server is shutting down.", code="shutting_down", headers={"connection": "close", "retry-after": "5"}
)

ABORTED = ApiError(
    503, "The request was ended by the operator.", code="request_aborted", headers={"x-should-retry": "false"}
)


class Server:
    """State and lifetime of one application, without its models."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tenants = Tenants(settings)
        self.bodies = Bodies(settings.max_body_bytes)
        self.metrics = Metrics(
            "" if settings.has_several_models else settings.model_names[0],
            prefix=settings.metrics_prefix,
            tenants=[tenant.name for tenant in self.tenants.all],
        )
        self.rates = RateLimits(time.monotonic)
        self.tracer = open_tracer(settings, self.metrics.on_lost_traces)
        self.phase = ServerPhase.STARTING
        self.loaded = anyio.Event()  # set when it becomes ready for the first time
        self.timelines = Timelines(settings.timeline_size)
        self.responses = ResponseStore(settings)
        self.workload = Workload()
        self._requests: set[RequestScope] = set()
        self._open_requests: set[RequestScope] = set()  # the requests that a drain waits for
        self._idle = anyio.Event()  # set when the last open request has ended, while draining
        self.task_group: TaskGroup | None = None  # set by the lifespan
        self.created = int(time.time())
        self.scoring_models: set[str] = set()  # the names of models that were loaded and give scores
        self.started = time.monotonic()

    # --- for routes

    @property
    def num_open_requests(self) -> int:
        """The number of HTTP requests that are being answered, without probes."""
        return len(self._open_requests)

    @property
    def busy_tenants(self) -> set[str]:
        return {request.tenant.name for request in self._requests}

    def longest_stalled_connection(self) -> tuple[ServerConnection, float] | None:
        """Return the longest stalled of the connections on which every request waits for the client, and since when."""
        stalled: dict[ServerConnection, float] = {}
        served: set[ServerConnection] = set()
        for request in self._requests:
            if request.connection is None:
                continue
            if (since := request.stalled_since) is None:
                served.add(request.connection)
            else:
                stalled[request.connection] = max(since, stalled.get(request.connection, since))
        waiting = [(since, connection) for connection, since in stalled.items() if connection not in served]
        if not waiting:
            return None
        since, connection = min(waiting, key=lambda pair: pair[0])
        return connection, since

    def abort(self, request_ids: Collection[str], but: RequestScope) -> int:
        """End the requests with these ids, except `but`, and return their number. Their clients get the output so far.

        An id is that of the answer's header x-request-id, the one in its body, or that of a choice in a snapshot.
        """
        ended = 0
        for request in list(self._open_requests):
            if request is but or request.follows_another:  # a follower ends with the request that it follows
                continue
            choices = () if request.outputs is None else request.outputs.child_ids
            if {request.request_id, request.answer_id, *choices}.isdisjoint(request_ids):
                continue
            ended += 1
            if request.outputs is not None:
                request.outputs.abort(request.outputs)
            else:
                request.end(ABORTED, FinishReason.ABORT)
        return ended

    # --- the lifetime

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, in the application's task group, a function belonging to no connection."""
        assert self.task_group is not None
        self.task_group.start_soon(function)

    def enter(self, request: RequestScope, *, quiet: bool) -> None:
        """Count a new request. A drain waits for it, unless it is `quiet` or came after the drain began."""
        self._requests.add(request)
        if not quiet and self.phase is not ServerPhase.STOPPING:
            self._open_requests.add(request)

    def leave(self, request: RequestScope) -> None:
        self._requests.discard(request)
        self._open_requests.discard(request)
        if not self._open_requests:
            self._idle.set()

    async def drain(self, leave_port: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refuse new requests, let those in flight finish within `drain_timeout`, and end the rest with an error.

        `leave_port` returns when no connection can bring a request any more; until then new requests are served.
        """
        notify("STOPPING=1")
        logger.info("Draining, requests in flight: %d", len(self._open_requests))
        with anyio.move_on_after(self.settings.drain_timeout):
            if leave_port is not None and self.phase is ServerPhase.READY:
                self.phase = ServerPhase.LEAVING
                await leave_port()
            self.stop()
            await self._until_idle()
        self.stop()
        cut = [request for request in self._open_requests if not request.follows_another]
        for request in cut:
            request.end(SHUTTING_DOWN, FinishReason.ABORT)
        with anyio.move_on_after(ERROR_FRAME_SECONDS):
            await self._until_idle()
        for request in self._open_requests:
            request.cut()
        level = logging.WARNING if cut else logging.INFO
        logger.log(level, "Drained. Requests cut at drain_timeout (%g s): %d", self.settings.drain_timeout, len(cut))

    def stop(self) -> None:
        if self.phase is not ServerPhase.FAILED:
            self.phase = ServerPhase.STOPPING

    async def _until_idle(self) -> None:
        while self._open_requests:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def watch_requests(self) -> None:
        """Disconnect clients that do not read, keep silent streams alive, drop expired responses, until cancelled."""
        settings = self.settings
        timeout = min(settings.send_timeout, settings.sse_keep_alive or math.inf)
        while True:
            await anyio.sleep(min(timeout / 8, 1.0))
            now = time.monotonic()
            for request in list(self._requests):
                request.tick(now)
            self.responses.expire(now)


ServerHandler = Callable[[Server, RequestScope], Awaitable[None]]
"""A handler of a route that needs no model."""


class ServerPhase(enum.StrEnum):
    """The server's phases: STARTING → READY → STOPPING, and FAILED from any of them. In LEAVING, before STOPPING, the
    server is not ready but still serves. With several models, READY does not depend on what is loaded."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    STOPPING = "stopping"
    FAILED = "failed"
