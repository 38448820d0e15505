"""What has to be patched in how Hypercorn 0.18 carries a request's messages, above all over HTTP/2.

`app.hypercorn_patches` applies it with everything else. What it promises, and why Hypercorn does not:

1. An upload that was refused before it had arrived does not block its connection. An application that answers and
   ends without reading leaves a queue of ten messages that nobody reads; the eleventh part of the body waits for room
   in it for ever, and with it the whole connection, all of its other streams, and its end. Anybody could fill the
   server with such connections: a key is not needed to be refused.
2. A stream fails alone. What h2 or Hypercorn cannot take from one (a malformed head, a byte that is not ASCII, a body
   longer than announced, parts of a body after the answer) would end its connection, with every other stream on it; a
   stream is reset instead. Priorities are not looked at, which RFC 9113 allows: a thousand of them would end it, too.
   So would the request after `keep_alive_max_requests`, by a farewell after which h2 sends nothing; they do not count.
3. A connection that is lost lets go of answers that wait for flow control, and of a request that waits for the answer
   before it. Otherwise a client that took no byte of its answer leaves the request waiting for a window that cannot
   open any more, and the process waiting for the request.
4. An answer that ends before its last byte, because its client was cut, ends in a reset of its stream. Otherwise the
   client would wait for the rest until it closes the connection.
5. An answer waits for its client's flow control. Hypercorn lets it go on whenever there is something to send and no
   window to send it in, and so buffers the whole answer of a client that reads nothing.
6. An HTTP/1.1 answer that comes before its request has arrived says that the connection will be closed. Hypercorn
   closes it without a word, and the client sends its next request into it.
7. Bytes that are no HTTP are refused in the words of all other errors. Hypercorn's own answer has no body.
8. An offer of another protocol (WebSocket, h2c) is declined by not taking it up, and CONNECT by a reset: nothing here
   speaks them. Hypercorn would answer a failed handshake and leave the connection open for ever; and a proxy that lets
   an upgrade through does not see the requests that follow it.
9. Hypercorn says when a connection becomes idle; where it forgets to (after the preface of HTTP/2, after a reset), this
   says it. And what belonged to a stream that was reset is let go of.
10. Who has streams reset faster than they can be answered is sent away, be it by its own resets or by what it makes
    the server reset. Resets make room for new streams, so that the limit of concurrent streams does not bound how many
    requests come at once.
11. What the headers of answers are compressed with stays small. h2 lets the client choose the size of that table, and
    searches it from one end to the other.
12. An answer has ended when its last frame is on its way. To Hypercorn it has when its last byte was taken out of the
    buffer, so that a server that ends would close the connection between the two.
13. Who wants to know of a client that leaves can be called instead of waiting for the message, by the extension
    CALL_ON_DISCONNECT of ASGI's scope: a task that waits beside each request is a tenth of what a short one costs, and
    what its cancellation leaves behind only the garbage collector finds.
14. The messages of a request are kept in a list. An asyncio.Queue takes three kilobytes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h11
import hypercorn.protocol
import hypercorn.protocol.h2
import hypercorn.protocol.h11
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PriorityFrame

from protocol.errors import ApiError

logger = logging.getLogger(__name__)

# Streams that a client may reset before their answer has begun: so many at once, and so many a second.
RESET_BURST = 200
RESETS_PER_SECOND = 50
CALL_ON_DISCONNECT = "headrace.call_on_disconnect"
MAX_ENCODER_TABLE = 4096  # bytes, as much as RFC 7541 begins with


def patch_streams() -> None:
    """For every connection that is opened from now on. Idempotent."""
    modules: Any = hypercorn.protocol
    modules.H11Protocol = _Http1
    modules.H2Protocol = _Http2
    modules.h11.HTTPStream = modules.h2.HTTPStream = _Stream
    modules.h2.StreamBuffer = _Buffer


class _Stream(HTTPStream):
    """Point 1: messages for an application that has ended are not waited for. And point 4, if not even the head of the
    answer is out: Hypercorn, which notes that it has begun when it has been sent, would send another one. And points
    13 and 14."""

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
        """Point 14: in the place of Hypercorn's task groups. Returns what gives the application a message."""
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
    """Points 3 and 6 to 8."""

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
        if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
            error = H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])
            error.args = ()  # whatever fails later would show them in the log: the client's own bytes
            raise error

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
        messages = {431: "The head of the request is larger than this server takes; send fewer or shorter headers."}
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
    """Point 3: nothing more comes from a connection that is lost, whatever has arrived. Nor is there anything to say
    about what follows the last request, be it a line break too many. To Hypercorn "head" is HEAD, which has no body;
    so it is here, where the body of any other method would be missed."""

    is_lost = False
    _request_method: bytes | None

    def next_event(self) -> Any:
        if self.is_lost:
            return h11.ConnectionClosed()
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._request_method = event.method.upper()
        return event

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)


class _Http2(H2Protocol):
    """Points 2 to 4, 8 to 10 and 12."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # As Hypercorn makes it, but for the offer of WebSockets.
        self.connection = _Http2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.connection.DEFAULT_MAX_INBOUND_FRAME_SIZE = self.config.h2_max_inbound_frame_size
        limits = {
            h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
            h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: self.config.h2_max_header_list_size,
        }
        self.connection.local_settings = h2.settings.Settings(client=False, initial_values=limits)
        self._unanswered: set[int] = set()
        self._resets_left = float(RESET_BURST)
        self._last_reset = time.monotonic()

    async def initiate(self, *args: Any) -> None:
        await super().initiate(*args)
        await self.send(Updated(idle=True))

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        if isinstance(event, StreamClosed) and buffer is not None and not buffer.complete and not self.closed:
            self._reset(event.stream_id, h2.errors.ErrorCodes.CANCEL)
            await self._let_go(event.stream_id)
            await self._flush()
        if isinstance(event, Response | StreamClosed):
            self._unanswered.discard(event.stream_id)
        await super().stream_send(event)

    async def _send_data(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        await super()._send_data(stream_id)
        if buffer is not None and stream_id not in self.stream_buffers:
            await buffer.close()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            is_over = self.closed or self.connection.state_machine.state is h2.connection.ConnectionState.CLOSED
            if is_over and not isinstance(event, h2.events.ConnectionTerminated):  # which ends its streams
                continue
            try:
                await self._handle_event(event)
            except Exception:
                if (stream_id := getattr(event, "stream_id", None)) is None:
                    raise
                logger.exception("A stream has failed")
                self._reset(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
                await self._end(stream_id)
                await self._count_reset(stream_id)
        await self._flush()

    async def _handle_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
            with suppress(h2.exceptions.ProtocolError):
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.RequestReceived) and not _is_taken(event.headers):
            self._unanswered.add(event.stream_id)
            self._reset(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            await self._count_reset(event.stream_id)
        elif isinstance(event, h2.events.RequestReceived) and self.context.terminated.is_set():
            self._reset(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
        elif isinstance(event, h2.events.StreamReset):
            if isinstance(event, _ResetHere):
                self._unanswered.add(event.stream_id)
            await self._end(event.stream_id)
            await self._count_reset(event.stream_id)
        else:
            if isinstance(event, h2.events.RequestReceived):
                self._unanswered.add(event.stream_id)
                self.keep_alive_requests = 0
            await super()._handle_events([event])

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        with suppress(h2.exceptions.ProtocolError):  # the client may have done so already
            self.connection.reset_stream(stream_id, code)

    async def _end(self, stream_id: int) -> None:
        was_open = stream_id in self.streams
        await self._close_stream(stream_id)
        await self._let_go(stream_id)
        if was_open:
            await self.send(Updated(idle=self.idle))

    async def _let_go(self, stream_id: int) -> None:
        """Have the sending task find that there is nothing to send any more."""
        if (buffer := self.stream_buffers.get(stream_id)) is not None:
            await buffer.close()
            self.priority.unblock(stream_id)
            await self.has_data.set()

    async def _count_reset(self, stream_id: int) -> None:
        if stream_id not in self._unanswered:
            return
        self._unanswered.discard(stream_id)
        now = time.monotonic()
        regained = (now - self._last_reset) * RESETS_PER_SECOND
        self._resets_left = min(self._resets_left + regained, RESET_BURST) - 1
        self._last_reset = now
        if self._resets_left < 0:
            with suppress(h2.exceptions.ProtocolError):
                self.connection.close_connection(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            await self._flush()
            await self.send(Closed())

    async def _priority_updated(self, event: h2.events.PriorityUpdated) -> None:
        pass


class _ResetHere(h2.events.StreamReset):
    """Because of what the client sent on it; once for each stream."""


class _Http2Connection(h2.connection.H2Connection):
    """Points 2 and 11: what RFC 9113 calls an error of a stream is one, and no client chooses what it costs to search
    the table of headers."""

    def _receive_frame(self, frame: Frame) -> list[h2.events.Event]:
        try:
            return super()._receive_frame(frame)
        except h2.exceptions.ProtocolError as error:
            stream = self.streams.get(frame.stream_id)
            if (
                not isinstance(frame, HeadersFrame | DataFrame)
                or type(error) not in (h2.exceptions.ProtocolError, h2.exceptions.InvalidBodyLengthError)
                or type(error.__cause__) not in (type(None), ValueError)  # others are of the headers' compression
                or stream is None
                or stream.closed
            ):
                raise
            if isinstance(frame, DataFrame):  # nobody else will give the connection's window back
                self.acknowledge_received_data(frame.flow_controlled_length, frame.stream_id)
            self.reset_stream(frame.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            return [_ResetHere(stream_id=frame.stream_id, remote_reset=False)]

    def _acknowledge_settings(self) -> list[Frame]:
        acknowledgement = super()._acknowledge_settings()
        self.encoder.header_table_size = size = min(self.encoder.header_table_size, MAX_ENCODER_TABLE)
        if sizes := self.encoder.table_size_changes:  # which the next answer tells; the least and the last suffice
            sizes[:] = [min(sizes), size]
        return acknowledgement

    def _receive_priority_frame(self, frame: HeadersFrame | PriorityFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        frame.depends_on = 0  # on itself would be an error
        return super()._receive_priority_frame(frame)


def _is_taken(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether this is a request that an application can be asked."""
    pseudo = {name: value for name, value in headers if name in (b":method", b":path")}
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    return bool(path) and method.isascii() and path.isascii() and method.upper() != b"CONNECT"


class _Buffer(StreamBuffer):
    """Points 5 and 12: what has been answered and not been sent. Hypercorn's `_paused` is set when more may be pushed,
    and `_is_empty`, which the end of the answer waits for, by `close` alone."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            if self._paused.is_set():  # clearing it twice would lose who waits already
                await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        length = min(len(self.buffer), max_length)
        data = bytes(self.buffer[:length])
        del self.buffer[:length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        return data
