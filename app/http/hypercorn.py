"""Patches of Hypercorn: how connections end and how messages reach the application.

`app.application` and `app.serving.process` apply the patches before the first connection. The second part of this file
has the patches that concern single requests. What the first part promises, and what Hypercorn does instead:

1. A connection is closed when its client has left, and when its time is up. Hypercorn's keep-alive timer does neither:
   it is a task that is not stopped when the client hangs up, so each such client would cost a socket in CLOSE_WAIT
   until the timer runs out. The timer is removed; `app.http.connections` ends connections and limits their number.
2. A client that does not read is noticed after some ten kilobytes, and its connection can be aborted. The kernel and
   the transport would buffer megabytes, hours of a slow stream. ASGI gives an application no access to its connection;
   `current_connection` finds it by a context variable, which every task of the connection inherits. A client that has
   closed its side without reading to the end is gone, too: on trio the send that waits for it cannot be cancelled.
3. The application drains before the listening socket is closed. Hypercorn closes the socket at once and informs the
   application last, so no request could be refused with an error and no probe could see that the server is draining. If
   other processes serve at the same port, `app.http.listening` closes the socket first, without losing connections.
4. A worker that fails makes the server fail. `hypercorn app:main` runs the application in a worker process and loses
   the status of a failed one: it joins the remaining workers, of which there are none, and returns 0. systemd and
   Docker take that for a server that is done.
5. A worker ends with the server. If Hypercorn's parent process were killed, its worker would go on serving, and hold
   the port and the memory of the model.
6. A connection fails alone. On trio, an exception that escapes from the task of one connection would end the server.
   A flood of connections does not take the last file descriptors, which files and engines may need: asyncio and uvloop
   accept connections before they can be counted, so the backlog is limited. If descriptors run out all the same,
   asyncio logs it a thousand times with a traceback each; here it is logged once.
7. A piece of a stream can be written straight to the transport, on asyncio and HTTP/1.1. Through Starlette, Hypercorn
   and h11 it passes fifteen calls, locks and checks, which cost several times what making the piece costs. The C++
   extension `app/http/csrc/step_writes.cpp` sends the pieces of a step together, except over TLS and to slow clients.
8. The parts of an answer that are ready together are written together. Hypercorn writes the head, the body and the end
   of the body one by one, and each costs a system call here and one at the client.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from http import HTTPStatus
from multiprocessing.synchronize import SemLock
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import h11
import hypercorn.protocol
import hypercorn.protocol.h11
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.utils import ShutdownError

from app.http.connections import ConnectionGuard, log_other_scheme
from app.http.listening import serve_listeners, start_server
from protocol.errors import ApiError

_step_writes: Any
try:
    from app.http import _step_writes  # type: ignore[attr-defined,no-redef]
except ImportError:  # the extension was not compiled
    _step_writes = None

logger = logging.getLogger(__name__)

SEND_BUFFER = 64 * 1024  # bytes in the kernel, which allocates twice as many
WRITE_BUFFER = 16 * 1024  # bytes in the transport beyond which send() waits
REFUSAL_SECONDS = 1.0  # the time in which a refused connection must send its first bytes and take its error

# ValueError: uvloop has given up the file descriptor. AttributeError: asyncio has None for the socket of a lost TLS.
_SOCKET_IS_GONE = (OSError, ValueError, AttributeError)
_SERVERS = ("hypercorn.asyncio.run", "hypercorn.trio.run")
_connection: ContextVar[ServerConnection | None] = ContextVar("headrace_connection", default=None)


def patch_hypercorn(guard: ConnectionGuard | None = None) -> None:
    """Apply points 1, 2 and 6 to those of Hypercorn's worker modules that are imported in this process. Idempotent.
    Called again with the guard of the application, before the first connection."""
    patch_streams()
    if guard is not None:
        ServerConnection.guard = guard
    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None and not issubclass(module.TCPServer, ServerConnection):
            module.TCPServer = type("TCPServer", (ServerConnection, module.TCPServer), {})
            if hasattr(module, "asyncio"):
                module.asyncio = SimpleNamespace(**vars(asyncio) | {"start_server": _start_server})
            else:
                module.trio = SimpleNamespace(**vars(module.trio) | {"serve_listeners": serve_listeners})


async def _start_server(
    on_connection: Callable[..., Awaitable[None]], *, sock: socket.socket, backlog: int, **tls: Any
) -> asyncio.Server:
    """Start asyncio's server with a limited backlog (point 6). asyncio accepts up to `backlog` connections at once, so
    it gets an eighth; `listen` then sets the kernel's backlog."""
    waiting = backlog if ServerConnection.guard is None else min(backlog, ServerConnection.guard.limits.newcomers)
    server = await start_server(on_connection, sock=sock, backlog=max(1, waiting // 8), **tls)
    sock.listen(waiting)
    return server


def drain_before_shutdown(
    drain: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]], guard: ConnectionGuard
) -> None:
    """Make Hypercorn drain before it shuts down (point 3): `drain` gets Hypercorn's wait for the shutdown signal,
    awaits it, and returns when the server may shut down."""

    async def raise_shutdown(trigger: Callable[[], Awaitable[None]]) -> None:
        await drain(trigger)
        guard.end()
        raise ShutdownError

    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None:
            module.raise_shutdown = raise_shutdown


def end_parent() -> None:
    """End Hypercorn's parent process, if this is its worker, by SIGUSR1, which it does not handle (point 4)."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    # Remove the parent's semaphores, as it would at an orderly end. Otherwise the log would end with a warning about
    # them. This must come before the signal, because point 5 ends this process with the parent.
    gc.unfreeze()  # gc.get_objects() does not return frozen objects
    for lock in gc.get_objects():
        if issubclass(type(lock), SemLock):  # isinstance would read __class__, at which some objects warn
            SemLock._cleanup(lock._semlock.name)  # type: ignore[attr-defined]
    with suppress(ProcessLookupError):  # the parent has ended already
        os.kill(parent.pid, signal.SIGUSR1)


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent process ends (point 5)."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, name="end-with-parent", daemon=True).start()


def current_connection() -> ServerConnection | None:
    """Return the connection that the current task serves; None if the server is not a patched Hypercorn."""
    return _connection.get()


class _NoTimer:
    """A replacement of Hypercorn's keep-alive timer that does nothing."""

    async def restart(self, *_: object) -> None: ...

    async def stop(self) -> None: ...


class ServerConnection:
    """A mixin for Hypercorn's `TCPServer` classes of asyncio and of trio."""

    guard: ClassVar[ConnectionGuard | None] = None
    writer: Any  # on asyncio only
    config: Any
    idle_task: Any
    head_since: float | None = None
    closing_since: float | None = None
    _transport: Any = None  # on asyncio only
    _descriptor = -1  # of the socket; -1: only the transport writes
    _client_gone = False
    _num_sending = 0
    _sending_since = 0.0
    _held: bytes | None = None  # bytes that are kept until `let_go`; None unless `hold` was called

    async def run(self) -> None:
        _connection.set(self)
        self.idle_task = _NoTimer()
        with suppress(*_SOCKET_IS_GONE):
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(self, "writer"):
            self._transport = self.writer.transport
            self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
            has_tls = hasattr(self.writer, "handshake") or self._transport.get_extra_info("sslcontext") is not None
            with suppress(*_SOCKET_IS_GONE):
                self._descriptor = -1 if has_tls or _step_writes is None else self._socket().fileno()
        try:
            await self._run_guarded()
        except Exception:
            logger.exception("A connection has failed")

    async def _run_guarded(self) -> None:
        guard = self.guard
        refusal = None if guard is None else guard.enter(self)
        try:
            if refusal is not None:
                await self._refuse(refusal)
            elif await self._shake_hands():
                await super().run()  # type: ignore[misc]  # of Hypercorn's class, as below
        finally:
            if guard is not None:
                guard.leave(self) if refusal is None else guard.leave_refused()

    async def _shake_hands(self) -> bool:
        """Shake hands if asyncio's server has TLS; trio does it itself. Return False if the client fails, or left."""
        handshake = getattr(getattr(self, "writer", None), "handshake", None)
        if handshake is None:
            return True
        try:
            await handshake
        except Exception as error:  # of any kind: a client may send anything instead
            log_other_scheme(error)
            self._transport.abort()
            self.writer._transport = self._transport  # asyncio leaves None, at which the writer's end would complain
            return False
        self._transport = self.writer.transport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        return self._socket() is not None

    # --- used by the guard

    @property
    def idle_timeout(self) -> float:
        """The seconds that a connection may be open without a request."""
        return float(self.config.keep_alive_timeout)

    @property
    def grace(self) -> float:
        """Seconds that a connection may last once the server ends: half of Hypercorn's own timeout."""
        return float(self.config.graceful_timeout) / 2

    @property
    def address(self) -> str | None:
        """The client's IP address; None for a Unix socket or a closed connection."""
        with suppress(*_SOCKET_IS_GONE):
            peer = self._socket().getpeername()
            return peer[0] if isinstance(peer, tuple) else None
        return None

    @property
    def has_part_of_a_head(self) -> bool:
        """True if an HTTP/1 request head has arrived in part."""
        http = getattr(getattr(self, "protocol", None), "protocol", None)
        return isinstance(http, H11Protocol) and bool(http.connection.trailing_data[0])

    @property
    def has_unsent(self) -> bool:
        """True if the transport holds data that the kernel has not taken yet. Never on trio, where each send waits."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def answer_once_more(self) -> None:
        """Let the next answer of every connection announce the close: all share `config`. HTTP/1 only."""
        self.config.keep_alive_max_requests = 1  # the count includes the request that is being answered

    def close(self) -> None:
        """Close the connection once the data in the transport has been sent. With TLS on asyncio, abort it."""
        if hasattr(self, "writer"):
            if hasattr(self.writer, "handshake"):
                self.abort()  # an orderly close would wait for the client's close_notify
            else:
                self.closing_since = self.closing_since or time.monotonic()
                self.writer.transport.close()
        else:
            self._shut_down()

    def abort(self) -> None:
        """Close the connection now, and drop its unsent data."""
        with suppress(*_SOCKET_IS_GONE):
            # SO_LINGER of 0 seconds makes the close a reset: the kernel keeps no data for a peer that never reads.
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if hasattr(self, "writer"):
            self.writer.transport.abort()
        else:
            self._shut_down()

    def seconds_blocked(self) -> float:
        """Return for how many seconds the client has not read the data that is being sent; 0 if none is."""
        return time.monotonic() - self._sending_since if self._num_sending else 0.0

    # --- pieces of streams

    @property
    def takes_more(self) -> bool:
        """True if `write_piece` may be called: no send is waiting, and the client keeps up."""
        transport = self._transport
        return (
            transport is not None
            and not self._num_sending
            and not self._client_gone
            and not transport.is_closing()
            and transport.get_write_buffer_size() < WRITE_BUFFER
        )

    def hold(self) -> None:
        """Keep the data that is sent from now on until `let_go`. The caller must not wait in between. HTTP/1 only."""
        if self._held is None:
            self._held = b""

    async def let_go(self) -> None:
        """Send the kept data in one write."""
        held, self._held = self._held, None
        if held:
            await self.protocol_send(RawData(held))

    def write_piece(self, data: bytes) -> None:
        """Write a chunk of an HTTP/1.1 body in chunked transfer encoding. The head must have been sent."""
        transport, piece = self._transport, b"%x\r\n%b\r\n" % (len(data), data)
        is_free = self._descriptor >= 0 and not transport.get_write_buffer_size()  # no earlier piece waits
        if not (is_free and _step_writes.add(transport, self._descriptor, piece)):
            transport.write(piece)

    def _socket(self) -> Any:
        if hasattr(self, "writer"):
            return self.writer.get_extra_info("socket")
        stream: Any = self.stream  # type: ignore[attr-defined]
        return getattr(stream, "transport_stream", stream).socket

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._socket().shutdown(socket.SHUT_RDWR)  # ends send_all and receive_some; then Hypercorn closes it

    async def _refuse(self, error: ApiError) -> None:
        """Send the error to a refused connection after its first bytes, and close it."""
        body = error.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        answer = "\r\n".join([*head, "", ""]).encode() + body
        # Errors are ignored. The client's data is read first because a close with unread data would be a reset, which
        # may overtake the answer.
        with anyio.move_on_after(REFUSAL_SECONDS), suppress(Exception):
            if hasattr(self, "writer"):
                if await self._shake_hands() and await self.reader.read(2**16):  # type: ignore[attr-defined]
                    self.writer.write(answer)
            elif await self.stream.receive_some(2**16):  # type: ignore[attr-defined]
                await self.stream.send_all(answer)  # type: ignore[attr-defined]
        self.close()

    async def _close(self) -> None:
        self.closing_since = self.closing_since or time.monotonic()
        if self.guard is not None:
            self.guard.closing(self)
        try:
            # Hypercorn passes `Closed` on trio only, and after the close: a task that waits to read would wait on.
            if (protocol := getattr(self, "protocol", None)) is not None:
                await protocol.handle(Closed())
        finally:
            if hasattr(self, "writer"):
                await asyncio.shield(self._close_writer())  # or a cancelled task would cancel the future of all others
            else:
                # Not send_eof(): it yields to the loop, and a task that sends in that time gets an unexpected error.
                with suppress(OSError, AttributeError):  # the latter with TLS
                    self.stream.socket.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
                await self.stream.aclose()  # type: ignore[attr-defined]

    async def _close_writer(self) -> None:
        with suppress(OSError):  # the client has sent data after the end of TLS, or something else than TLS
            # Closed only once: after a second close(), asyncio's TLS would ignore abort().
            await (self.writer.wait_closed() if self._transport.is_closing() else super()._close())  # type: ignore[misc]

    async def _read_data(self) -> None:
        await super()._read_data()  # type: ignore[misc]  # returns at the end of the client's bytes
        self._client_gone = True
        if self._num_sending:
            self.abort()

    async def protocol_send(self, event: Event) -> None:
        if self._held is not None:
            if isinstance(event, RawData):
                self._held += event.data
                return
            await self.let_go()
        if isinstance(event, RawData):
            if self._transport is not None and self._transport.is_closing():
                await self.protocol.handle(Closed())  # type: ignore[attr-defined]
                return
            if self._num_sending == 0:
                self._sending_since = time.monotonic()
            self._num_sending += 1
            try:
                await super().protocol_send(event)  # type: ignore[misc]
            finally:
                self._num_sending -= 1
                self._sending_since = time.monotonic()
        elif not isinstance(event, Updated):
            await super().protocol_send(event)  # type: ignore[misc]
        elif self.guard is not None:
            (self.guard.idle if event.idle else self.guard.busy)(self)


@contextmanager
def written_together() -> Iterator[None]:
    """Collect the pieces that a block writes, and send them at its end. It never awaits or writes twice to a stream."""
    if _step_writes is None or not _step_writes.begin():
        yield
        return
    try:
        yield
    finally:
        for transport, unsent in _step_writes.end():
            transport.write(unsent)


# ---------------------------------------------------------------------------------------------------- hypercorn streams
# Patches of how Hypercorn 0.18 carries the messages of a request over HTTP/1.1. They promise, unlike Hypercorn:
#
# S1. An upload that is refused before it has arrived does not block its connection. In Hypercorn, an application that
#     answers and ends without reading leaves an unread queue of ten messages; the eleventh part of the body waits for
#     ever for room in it, and the connection never ends. A client needs no key to be refused, so any client could fill
#     the server with such connections.
# S2. When a connection is lost, a pipelined request that waits for the answer before it ends. Otherwise the process
#     would wait for that request.
# S3. An answer that ends before its head, because its client was cut off, ends its connection. Hypercorn would send
#     another head.
# S4. An answer that is sent before its request has arrived has `connection: close`. Hypercorn closes the connection
#     without this header, and the client sends its next request into it.
# S5. Bytes that are not HTTP/1.1 get an ordinary error body, and so does the preface of HTTP/2, which only a TLS
#     connection may negotiate. Hypercorn's own answer has no body.
# S6. An upgrade to another protocol (WebSocket, h2c) is ignored: no other protocol is supported. Hypercorn would answer
#     a failed handshake and leave the connection open for ever; and a proxy that passes an upgrade on does not see the
#     requests that follow it.
# S7. The extension CALL_ON_DISCONNECT of ASGI's scope calls a function when the client leaves. A task per request that
#     waits for the disconnect message would cost a tenth of a short request, and leave garbage to the collector.
# S8. The messages of a request are kept in a list. An asyncio.Queue takes three kilobytes.
# S9. A request with both Content-Length and Transfer-Encoding is refused, and its connection closed. A proxy in front
#     that believes the other header would take the rest of the body for the next client's request.


CALL_ON_DISCONNECT = "headrace.call_on_disconnect"


def patch_streams() -> None:
    """Apply the patches to every connection that is opened from now on. Idempotent."""
    modules: Any = hypercorn.protocol
    modules.H11Protocol = _Http1
    modules.h11.HTTPStream = _Stream


class _Stream(HTTPStream):
    """A request and its answer, with S7 and S8. Messages for an application that has ended are dropped (S1).
    An answer has begun when the application starts it, not when its head has been sent (S3)."""

    _app_has_ended = False
    _answer_has_begun = False
    _on_disconnect: Callable[[], None] | None = None
    _changed: anyio.Event | None = None  # set for the tasks that wait for a message, or for room for one

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._messages: list[Any] = []
        self._tasks: Any = self.task_group
        self.task_group: Any = self  # Hypercorn calls its `spawn_app`, which puts the task group back

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Callable[[Any], Awaitable[None]]:
        """Run the application, instead of Hypercorn's task group (S8). Return a function that passes it a message."""
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
            self.app_put, self._on_disconnect = _ignore, None  # this also frees the reference of the stream to itself
            if self._answer_has_begun and self.state is ASGIHTTPState.REQUEST:
                self.state = ASGIHTTPState.RESPONSE
            self._tell()
        elif message["type"] == "http.response.start":
            self._answer_has_begun = True
        await super().app_send(message)

    async def _put(self, message: Any) -> None:
        # The disconnect message is sent in the application's own task, by its last byte, so it must not wait for room.
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
    """Hypercorn's HTTP/1.1 protocol with S2 and S4 to S6."""

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
        """Do nothing: upgrades (WebSocket, h2c) are ignored."""

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
        log_other_scheme(first_bytes=self.connection.trailing_data[0])
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


_BOTH_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class _Http1Connection(h11.Connection):
    """h11's connection with S2, S5 and S9. A lost connection yields no more events, even if data has arrived. Data
    after the last request, such as a line break, is ignored. Hypercorn takes the method "head" for HEAD and sends no
    body; h11 gets it in upper case, because it would miss a body after any other method."""

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
            if {name for name, _ in event.headers} >= _BOTH_LENGTHS:
                raise h11.RemoteProtocolError("a body with two lengths")
            self._request_method = event.method.upper()
        return event

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)
