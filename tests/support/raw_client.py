"""One TCP connection that speaks HTTP/1.1 by hand, so that a test decides which bytes go out and how it ends.

`sse_events` reads event streams from any client.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Self

import h11
import orjson

NO_LINGER = struct.pack("ii", 1, 0)


class RawClient:
    """A connection; leaving its block closes it."""

    def __init__(self, host: str, port: int, *, timeout: float, receive_buffer: int | None = None) -> None:
        self._host = f"{host}:{port}"
        self._socket = socket.socket()
        if receive_buffer is not None:  # bytes, before the connection tells the server about them
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(timeout)
        self._socket.connect((host, port))
        self._http = h11.Connection(h11.CLIENT)
        self._events = self._read_events()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def be_patient_for(self, seconds: float) -> None:
        """From now on give up what takes longer, with a TimeoutError."""
        self._socket.settimeout(seconds)

    # --- talking

    def send_bytes(self, data: bytes) -> None:
        """Any bytes at all."""
        self._socket.sendall(data)

    def post(self, path: str, body: dict[str, Any], more_headers: dict[str, str] | None = None) -> None:
        """A JSON request in one write."""
        payload = json.dumps(body).encode()
        headers = [("host", self._host), ("content-type", "application/json"), ("content-length", str(len(payload)))]
        headers += (more_headers or {}).items()
        head = self._http.send(h11.Request(method="POST", target=path, headers=headers))
        self.send_bytes(head + self._http.send(h11.Data(payload)) + self._http.send(h11.EndOfMessage()))

    def get(self, path: str) -> None:
        """A request without a body in one write."""
        request = self._http.send(h11.Request(method="GET", target=path, headers=[("host", self._host)]))
        self.send_bytes(request + self._http.send(h11.EndOfMessage()))

    # --- listening

    def read_head(self) -> h11.Response:
        """The status and headers of the answer."""
        head = next(self._events)
        assert isinstance(head, h11.Response), head
        return head

    def chunks(self) -> Iterator[bytes]:
        """The body, piece by piece. Can be left and taken up again."""
        for event in self._events:
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    def read_body(self) -> bytes:
        """The rest of the answer."""
        return b"".join(self.chunks())

    def next_exchange(self) -> None:
        """Make the connection ready for its next request, which the server has to allow."""
        self._http.start_next_cycle()
        self._events = self._read_events()

    def read_raw(self) -> bytes:
        """Everything until the server closes, for requests that were sent as bytes; ask for `connection: close`."""
        received = b""
        while chunk := self._socket.recv(65536):
            received += chunk
        return received

    def _read_events(self) -> Iterator[h11.Event]:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(self._socket.recv(65536))
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
            else:
                assert isinstance(event, h11.Event)
                yield event

    # --- leaving

    def end_of_requests(self) -> None:
        """A FIN, with the other direction left open and unread."""
        self._socket.shutdown(socket.SHUT_WR)

    def leave_with_fin(self) -> None:
        """Close the way a client does that ends in order: a FIN, even if there are bytes it never read."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the server was first, with a reset
                raise
        self._socket.close()

    def leave_with_rst(self) -> None:
        """Close the way a client does that is killed: a RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._socket.close()


def sse_events(chunks: Iterable[bytes]) -> Iterator[Any]:
    """The events of a stream as they arrive: JSON objects, and "[DONE]" as a string.

    Comments are passed over. An event that has a name has to say it in its data, too, as `type`.
    """
    pending = b""
    for chunk in chunks:
        pending += chunk
        *frames, pending = pending.split(b"\n\n")
        for frame in frames:
            if not frame.startswith(b":"):
                name, _, data = frame.rpartition(b"\n")
                assert data.startswith(b"data: "), frame
                payload = data.removeprefix(b"data: ")
                event: Any = "[DONE]" if payload == b"[DONE]" else orjson.loads(payload)
                assert not name or name == b"event: " + event["type"].encode(), frame
                yield event
    assert not pending, f"the stream ended within an event: {pending!r}"
