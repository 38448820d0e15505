"""Whatever one stream of HTTP/2 says, it is that stream that ends, and no other on its connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import h2.errors
import pytest
from hpack import Encoder, NeverIndexedHeaderTuple
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PriorityFrame

from tests.server.harness import TIMEOUT, Server
from tests.server.http2_client import Http2Client
from tests.server.tiny_model import tiny_server

STORY: dict[str, Any] = {
    "prompt": "A headrace is a channel that",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 20,
}
PATH = "/v1/completions"
EVERY_LOOP = pytest.mark.parametrize("server", ["uvloop", "asyncio", "trio"], indirect=True, scope="module")

USUAL = {":method": b"POST", ":path": b"/tokenize", ":scheme": b"http", ":authority": b"localhost"}

MALFORMED: dict[str, dict[str, bytes | None]] = {
    "path not ASCII": {":path": b"/\xc3\xa9"},
    "method not ASCII": {":method": b"G\xcbT"},
    "no path": {":path": None},
    "empty path": {":path": b""},
    "no method": {":method": None},
    "no scheme": {":scheme": None},
    "no authority": {":authority": None},
    "unknown pseudo-header": {":colour": b"red"},
    "upper case": {"X-Upper": b"a"},
    "connection header": {"connection": b"close"},
    "line break in a value": {"x-a": b"b\r\nc: d"},
    "content-length no number": {"content-length": b"ten"},
    "content-length too long a number": {"content-length": b"1" * 5000},
    "content-length negative": {"content-length": b"-1"},
    "body longer than announced": {"content-length": b"1"},
    "body shorter than announced": {"content-length": b"1000"},
    "connect": {":method": b"CONNECT", ":path": None, ":scheme": None},
    "extended connect": {":method": b"CONNECT", ":protocol": b"websocket"},
}
TAKEN: dict[str, dict[str, bytes | None]] = {  # and answered by an error, or not even that
    "value not ASCII": {"x-a": b"\xff\xfe"},
    "authority not ASCII": {":authority": b"\xff"},
    "scheme not ASCII": {":scheme": b"\xff"},
    "escaped path not UTF-8": {":path": b"/%ff%fe"},
    "path with NUL": {":path": b"/%00"},
    "unknown method": {":method": b"BREW"},
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with tiny_server(request.param) as running:
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log


def frames_of(stream_id: int, changes: dict[str, bytes | None]) -> list[Frame]:
    """A request as it comes, without the client's own library to correct it, and a body of ten bytes."""
    fields = {name: value for name, value in (USUAL | changes).items() if value is not None}
    return [
        HeadersFrame(stream_id, encode(fields), flags=["END_HEADERS"]),
        DataFrame(stream_id, b" " * 10, flags=["END_STREAM"]),
    ]


def encode(fields: Mapping[str, bytes]) -> bytes:
    """Without a trace in the compression's state."""
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields.items()], huffman=False)


@EVERY_LOOP
def test_malformed_request_is_reset_and_no_other_stream_is(server: Server) -> None:
    alone = server.complete(**STORY)["choices"][0]["text"]
    with Http2Client(server.port, timeout=TIMEOUT) as client:
        beside = client.post(PATH, {**STORY, "stream": True})
        client.read_head(beside)
        for name, changes in MALFORMED.items():
            stream_id = client.send_frames(partial(frames_of, changes=changes))
            assert client.wait_reset(stream_id) == h2.errors.ErrorCodes.PROTOCOL_ERROR, name
        for changes in TAKEN.values():
            stream_id = client.send_frames(partial(frames_of, changes=changes))
            assert client.read_head(stream_id)[":status"][0] == "4"
        assert b"[DONE]" in client.read_body(beside)
        assert client.read_json(client.post(PATH, STORY))["choices"][0]["text"] == alone


@EVERY_LOOP
def test_trailers_and_priorities_disturb_nobody(server: Server) -> None:
    def with_trailers(stream_id: int) -> list[Frame]:
        head, body = frames_of(stream_id, {})
        body.flags.discard("END_STREAM")
        trailers = HeadersFrame(stream_id, encode({"x-a": b"b"}), flags=["END_HEADERS", "END_STREAM"])
        return [head, body, trailers]

    def with_unended_trailers(stream_id: int) -> list[Frame]:
        *parts, trailers = with_trailers(stream_id)
        trailers.flags.discard("END_STREAM")
        return [*parts, trailers]

    def depending_on_itself(stream_id: int) -> list[Frame]:
        head, body = frames_of(stream_id, {})
        assert isinstance(head, HeadersFrame)
        head.flags.add("PRIORITY")
        head.depends_on = stream_id
        return [PriorityFrame(stream_id, depends_on=stream_id), head, body]

    def many_priorities(stream_id: int) -> list[Frame]:
        idle = [PriorityFrame(stream_id + 2 * number, depends_on=stream_id) for number in range(1, 1500)]
        return [*frames_of(stream_id, {}), *idle]

    with Http2Client(server.port, timeout=TIMEOUT) as client:
        assert client.read_head(client.send_frames(with_trailers))[":status"] == "400"
        client.wait_reset(client.send_frames(with_unended_trailers))
        assert client.read_head(client.send_frames(depending_on_itself))[":status"] == "400"
        assert client.read_head(client.send_frames(many_priorities))[":status"] == "400"
        client.read_json(client.post(PATH, STORY))


@EVERY_LOOP
def test_connection_goes_on_after_a_thousand_requests_that_were_reset(server: Server) -> None:
    """Each when its answer had begun and waited for a window."""
    with Http2Client(server.port, timeout=TIMEOUT, window=0) as client:
        for _ in range(22):
            streams = [client.post("/nowhere", {}, flush=False) for _ in range(50)]
            client.flush()
            for stream_id in streams:
                assert client.read_head(stream_id)[":status"] == "404"
                client.reset(stream_id, flush=False)
            client.flush()
        client.open_windows()
        client.read_json(client.post(PATH, STORY))


@EVERY_LOOP
def test_who_resets_faster_than_can_be_answered_is_sent_away(server: Server) -> None:
    with Http2Client(server.port, timeout=TIMEOUT) as client:
        for _ in range(1000):
            client.reset(client.start_post("/tokenize"), flush=False)
        client.flush()
        assert client.wait_goodbye() == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    server.complete(**STORY)


@EVERY_LOOP
def test_who_makes_the_server_reset_faster_than_can_be_answered_is_sent_away(server: Server) -> None:
    """By a part of a body after its end."""

    def ended_twice(stream_id: int) -> list[Frame]:
        return [*frames_of(stream_id, {"content-length": b"10"}), DataFrame(stream_id, b"x")]

    with Http2Client(server.port, timeout=TIMEOUT) as client:
        with suppress(ConnectionError):
            for _ in range(600):
                client.send_frames(ended_twice)
        assert client.wait_goodbye() == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    server.complete(**STORY)


@EVERY_LOOP
def test_table_of_headers_does_not_grow_as_the_client_likes(server: Server) -> None:
    with Http2Client(server.port, timeout=TIMEOUT) as client:
        client.announce_table_size(2**31 - 1)
        for _ in range(200):  # each answer's x-request-id is one entry
            assert client.read_head(client.post("/nowhere", {}))[":status"] == "404"
        assert client.table_size <= 4096
