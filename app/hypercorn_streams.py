"""What has to be mended in how Hypercorn 0.18 carries a request's messages, above all over HTTP/2.

`app.hypercorn_fixes` applies it with everything else. What it promises, and why Hypercorn does not:

1. An upload that was refused before it had arrived does not block its connection. An application that answers and
   ends without reading leaves a queue of ten messages that nobody reads; the eleventh part of the body waits for room
   in it for ever, and with it the whole connection, all of its other streams, and its end. Anybody could fill the
   server with such connections: a key is not needed to be refused.
2. What still arrives for a stream that has been answered is dropped. Hypercorn looks the stream up, fails, and takes
   every other stream of the connection down with it.
3. A connection that is lost lets go of answers that wait for flow control. Otherwise a client that took no byte of its
   answer leaves the request waiting for a window that cannot open any more, and the process waiting for the request.
4. An answer that ends before its last byte, because its client was cut, ends in a reset of its stream. Otherwise the
   client would wait for the rest until it closes the connection.
5. An answer waits for its client's flow control. Hypercorn lets it go on whenever there is something to send and no
   window to send it in, and so buffers the whole answer of a client that reads nothing.
6. An HTTP/1.1 answer that comes before its request has arrived says that the connection will be closed. Hypercorn
   closes it without a word, and the client sends its next request into it.
7. Bytes that are no HTTP are refused in the words of all other errors. Hypercorn's own answer has no body.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import h2.errors
import h2.events
import h2.exceptions
import h11
import hypercorn.protocol
import hypercorn.protocol.h2
import hypercorn.protocol.h11
from hypercorn.events import Closed, Event
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from protocol.errors import ApiError


def mend_streams() -> None:
    """For every connection that is opened from now on. Idempotent."""
    modules: Any = hypercorn.protocol
    modules.H11Protocol = _Http1
    modules.H2Protocol = _Http2
    modules.h11.HTTPStream = modules.h2.HTTPStream = _Stream
    modules.h2.StreamBuffer = _Buffer


class _Stream(HTTPStream):
    """Point 1: messages for an application that has ended are not waited for."""

    _app_has_ended = False

    async def handle(self, event: StreamEvent) -> None:
        await super().handle(event)
        if isinstance(event, Request) and getattr(self, "app_put", None) is not None:
            self._put = self.app_put
            self._puts_in_progress: set[anyio.CancelScope] = set()
            self.app_put = self._put_unless_ended

    async def app_send(self, message: Any) -> None:
        if message is None:
            self._app_has_ended = True
            for scope in getattr(self, "_puts_in_progress", ()):
                scope.cancel()
        await super().app_send(message)

    async def _put_unless_ended(self, message: Any) -> None:
        # The application itself brings about this last message, by its last byte; it must not wait for itself to read.
        if message["type"] == "http.disconnect":
            self.task_group.spawn(self._wait_for_room, message)
        else:
            await self._wait_for_room(message)

    async def _wait_for_room(self, message: Any) -> None:
        if not self._app_has_ended:
            with anyio.CancelScope() as scope:
                self._puts_in_progress.add(scope)
                try:
                    await self._put(message)
                finally:
                    self._puts_in_progress.discard(scope)


class _Http1(H11Protocol):
    """Points 6 and 7."""

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


class _Http2(H2Protocol):
    """Points 2 to 4."""

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        if isinstance(event, StreamClosed) and buffer is not None and not buffer.complete and not self.closed:
            with suppress(h2.exceptions.ProtocolError):  # the client may have reset it already
                self.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.CANCEL)
            await buffer.close()
            await self._flush()
        await super().stream_send(event)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                await super()._handle_events([event])
        await self._flush()


class _Buffer(StreamBuffer):
    """Point 5: what has been answered and not been sent. Hypercorn's `_paused` is set when more may be pushed."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
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
        if not self.buffer:
            await self._is_empty.set()
        return data
