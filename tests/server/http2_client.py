"""One HTTP/2 connection, by prior knowledge and without TLS, whose frames the test sends one by one."""

from __future__ import annotations

import copy
import json
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2.errors import ErrorCodes
from hyperframe.frame import Frame

from tests.server.raw_client import NO_LINGER


class Http2Client:
    """A connection; leaving its block closes it. Streams go by their id. Reading reads for all of them.

    `window` is how many bytes each stream may receive before the client gives it more; None: as many as come.
    """

    def __init__(self, port: int, *, timeout: float, window: int | None = None) -> None:
        self._authority = f"127.0.0.1:{port}"
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._gives_window = window is None
        self._events: dict[int, deque[h2.events.Event]] = defaultdict(deque)
        self._http.initiate_connection()
        if window is not None:
            self._http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    # --- talking

    def post(self, path: str, body: dict[str, Any], *, flush: bool = True, **headers: str) -> int:
        """Send a whole JSON request. Returns its stream."""
        stream_id = self.start_post(path, **headers)
        self.send_data(stream_id, json.dumps(body).encode(), end=True)
        if flush:
            self.flush()
        return stream_id

    def start_post(self, path: str, **headers: str) -> int:
        """Send a request's headers only."""
        stream_id = self._http.get_next_available_stream_id()
        pseudo = {":method": "POST", ":path": path, ":scheme": "http", ":authority": self._authority}
        self._http.send_headers(stream_id, [*pseudo.items(), ("content-type", "application/json"), *headers.items()])
        return stream_id

    def send_data(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """A part of a body, once the server's flow control lets it. It goes out with the next `flush`."""
        while data:
            room = min(self._http.local_flow_control_window(stream_id), self._http.max_outbound_frame_size)
            if room == 0:
                self.flush()
                self._receive()
                continue
            self._http.send_data(stream_id, data[:room])
            data = data[room:]
        if end:
            self._http.end_stream(stream_id)

    def send_frames(self, make: Callable[[int], list[Frame]]) -> int:
        """Frames of a new stream as they are, past the library's own checks; they must leave the compression's state
        alone. Returns the stream."""
        self.flush()
        encoder = copy.deepcopy(self._http.encoder)
        stream_id = self.start_post("/")  # not sent, but now the library takes what comes for the stream
        self._http.clear_outbound_data_buffer()
        self._http.encoder = encoder
        self._socket.sendall(b"".join(frame.serialize() for frame in make(stream_id)))
        return stream_id

    def reset(self, stream_id: int, *, flush: bool = True) -> None:
        """RST_STREAM: what a client sends that no longer wants this answer."""
        self._http.reset_stream(stream_id, ErrorCodes.CANCEL)
        if flush:
            self.flush()

    def say_goodbye(self) -> None:
        """GOAWAY, and leave the socket open."""
        self._http.close_connection()
        self.flush()

    def open_windows(self) -> None:
        """From now on streams may receive as many bytes as come."""
        self._gives_window = True
        self._http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**16})
        self.flush()

    def announce_table_size(self, size: int) -> None:
        """How large a table of headers the server may use for its answers."""
        self._http.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: size})
        self.flush()

    @property
    def table_size(self) -> int:
        """Of the server's table of headers, as it has been told by its answers."""
        return self._http.decoder.header_table_size

    def flush(self) -> None:
        self._socket.sendall(self._http.data_to_send())

    # --- listening

    def read_head(self, stream_id: int) -> dict[str, str]:
        """The headers of the answer, `:status` among them."""
        event = self._next(stream_id)
        assert isinstance(event, h2.events.ResponseReceived), event
        return cast("dict[str, str]", dict(event.headers))  # text, since the connection decodes it

    def chunks(self, stream_id: int) -> Iterator[bytes]:
        """The body, piece by piece; it must end in order."""
        while not isinstance(event := self._next(stream_id), h2.events.StreamEnded):
            assert isinstance(event, h2.events.DataReceived), event
            yield event.data

    def read_body(self, stream_id: int) -> bytes:
        """The rest of the answer."""
        return b"".join(self.chunks(stream_id))

    def read_json(self, stream_id: int) -> dict[str, Any]:
        """The whole of an answer that must be a success."""
        head = self.read_head(stream_id)
        body = self.read_body(stream_id)
        assert head[":status"] == "200", body
        return json.loads(body)

    def wait_reset(self, stream_id: int) -> ErrorCodes | int:
        """Read until the server resets the stream. Returns why."""
        while not isinstance(event := self._next(stream_id), h2.events.StreamReset):
            assert not isinstance(event, h2.events.StreamEnded), "it ended in order"
        return event.error_code

    def wait_goodbye(self) -> ErrorCodes | int | None:
        """Read until the server ends the connection by GOAWAY. Returns why."""
        while True:
            data = self._socket.recv(65536)
            assert data, "the server closed the connection"
            for event in self._http.receive_data(data):
                if isinstance(event, h2.events.ConnectionTerminated):
                    return event.error_code

    def _next(self, stream_id: int) -> h2.events.Event:
        while not self._events[stream_id]:
            self._receive()
        return self._events[stream_id].popleft()

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the server closed the connection"
        for event in self._http.receive_data(data):
            if isinstance(event, h2.events.DataReceived) and self._gives_window:
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            kinds = h2.events.ResponseReceived | h2.events.DataReceived | h2.events.StreamEnded | h2.events.StreamReset
            if isinstance(event, kinds):
                self._events[event.stream_id].append(event)
            assert not isinstance(event, h2.events.ConnectionTerminated), event
        self.flush()

    # --- leaving

    def leave_with_fin(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_with_rst(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._socket.close()
