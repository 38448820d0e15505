"""Patches of how Hypercorn 0.18 carries the messages of a request over HTTP/1.1.

`app.hypercorn_patches` applies them with everything else. What they promise, and why Hypercorn does not:

1. An upload that was refused before it had arrived does not block its connection. An application that answers and
   ends without reading leaves a queue of ten messages that nobody reads; the eleventh part of the body waits for room
   in it for ever, and with it the connection and its end. A client needs no key to be refused, so anybody could fill
   the server with such connections.
2. A connection that is lost lets go of a request that waits for the answer before it. Otherwise the process would wait
   for that request.
3. An answer that ends before its head, because its client was cut, ends its connection. Hypercorn would send another
   head.
4. An answer that comes before its request has arrived says that the connection will be closed. Hypercorn closes it
   without a word, and the client sends its next request into it.
5. Bytes that are no HTTP/1.1 are refused in the words of all other errors, and so is the preface of HTTP/2, which only
   a TLS connection may negotiate. Hypercorn's own answer has no body.
6. An offer of another protocol (WebSocket, h2c) is declined by not taking it up: nothing here speaks them. Hypercorn
   would answer a failed handshake and leave the connection open for ever; and a proxy that lets an upgrade through
   does not see the requests that follow it.
7. The extension CALL_ON_DISCONNECT of ASGI's scope calls a function when the client leaves. A task that waits for the
   message beside each request is a tenth of what a short one costs, and only the garbage collector finds what its
   cancellation leaves behind.
8. The messages of a request are kept in a list. An asyncio.Queue takes three kilobytes.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import h11
import hypercorn.protocol
import hypercorn.protocol.h11
from hypercorn.events import Closed, Event
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream

from protocol.errors import ApiError

CALL_ON_DISCONNECT = "headrace.call_on_disconnect"


def patch_streams() -> None:
    """For every connection that is opened from now on. Idempotent."""
    modules: Any = hypercorn.protocol
    modules.H11Protocol = _Http1
    modules.h11.HTTPStream = _Stream


class _Stream(HTTPStream):
    """Point 1: messages for an application that has ended are not waited for. And point 3: Hypercorn notes that an
    answer has begun when its head has been sent. And points 7 and 8."""

    _app_has_ended = False
    _answer_has_begun = False
    _on_disconnect: Callable[[], None] | None = None
    _changed: anyio.Event | None = None  # of who waits for a message, or for room for one

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._messages: list[Any] = []
        self._tasks: Any = self.task_group
        self.task_group: Any = self  # until the application runs

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Callable[[Any], Awaitable[None]]:
        """Point 8: in the place of Hypercorn's task groups. Returns what gives the application a message."""
        self.task_group = self._tasks
        scope["extensions"][CALL_ON_DISCONNECT] = self._call_on_disconnect
        run_app = sys.modules[type(self._tasks).__module__]._handle
        self._tasks.spawn(run_app, app, config, scope, self._receive, send, None, None)
        return self._put

    def _call_on_disconnect(self, function: Callable[[], None]) -> None:
        self._on_disconnect = function
        if self.closed:
            function()

    async def app_send(self, message: Any) -> None:
        if message is None:
            self._app_has_ended = True
            self.app_put, self._on_disconnect = _ignore, None  # nor does the stream hold itself any more
            if self._answer_has_begun and self.state is ASGIHTTPState.REQUEST:
                self.state = ASGIHTTPState.RESPONSE
            self._tell()
        elif message["type"] == "http.response.start":
            self._answer_has_begun = True
        await super().app_send(message)

    async def _put(self, message: Any) -> None:
        # The application itself brings about the last message, by its last byte; it must not wait for itself to read.
        if message["type"] != "http.disconnect":
            while len(self._messages) >= self.config.max_app_queue_size and not self._app_has_ended:
                await self._wait()
        elif self._on_disconnect is not None:
            self._on_disconnect()
            return
        self._messages.append(message)
        self._tell()

    async def _receive(self) -> Any:
        while not self._messages:
            await self._wait()
        message = self._messages.pop(0)
        self._tell()
        return message

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


async def _ignore(message: Any) -> None:
    pass


class _Http1(H11Protocol):
    """Points 2 and 4 to 6."""

    connection: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection = _Http1Connection(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            self.connection.is_lost = True
            await self.can_read.set()

    async def _check_protocol(self, event: h11.Request) -> None:
        """Leave the protocol as it is: point 6."""

    async def _create_stream(self, request: h11.Request) -> None:
        if any(name == b"upgrade" for name, _ in request.headers):
            headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        await super()._create_stream(request)

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and self.connection.their_state is h11.SEND_BODY:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _send_error_response(self, status_code: int) -> None:
        messages = {
            431: "The head of the request is larger than this server takes; send fewer or shorter headers.",
            505: "This server does not speak HTTP/2. Use HTTP/1.1, or a proxy in front that speaks HTTP/2.",
        }
        error = ApiError(status_code, messages.get(status_code, "This is not valid HTTP/1.1."))
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _Http1Connection(h11.Connection):
    """Points 2 and 5: nothing more comes from a connection that is lost, whatever has arrived. Nor is there
    anything to say about what follows the last request, be it a line break too many. To Hypercorn "head" is HEAD, which
    has no body; so it is here, where the body of any other method would be missed."""

    is_lost = False
    _request_method: bytes | None

    def next_event(self) -> Any:
        if self.is_lost:
            return h11.ConnectionClosed()
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
                raise h11.RemoteProtocolError("the preface of HTTP/2", error_status_hint=505)
            self._request_method = event.method.upper()
        return event

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)
