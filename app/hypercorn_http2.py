"""HTTP/2's part of what `app.hypercorn_streams` promises, which alone uses it: the points are those of that file."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PriorityFrame

logger = logging.getLogger(__name__)

# Streams that a client may reset before their answer has begun: so many at once, and so many a second.
RESET_BURST = 200
RESETS_PER_SECOND = 50
MAX_ENCODER_TABLE = 4096  # bytes, as much as RFC 7541 begins with


class Http2(H2Protocol):
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


class Buffer(StreamBuffer):
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
