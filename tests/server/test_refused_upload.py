"""An upload that is refused before it has arrived costs nobody anything: neither its connection nor the server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import TIMEOUT, Server
from tests.server.http2_client import Http2Client
from tests.server.raw_client import sse_events
from tests.server.victims import PATH

STORY: dict[str, Any] = {
    "prompt": "A headrace is a channel that",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 50,
}
PARTS = 50  # of a body; more than Hypercorn queues

pytestmark = pytest.mark.parametrize(
    "narrow_tiny_server", ["uvloop", "asyncio", "trio"], indirect=True, scope="session"
)


def test_rest_of_a_refused_upload_does_not_disturb_the_streams_beside_it(narrow_tiny_server: Server) -> None:
    """Over HTTP/2 it arrives at a stream that has been answered and closed."""
    server = narrow_tiny_server
    alone = server.complete(**STORY)["choices"][0]["text"]
    with Http2Client(server.port, timeout=TIMEOUT) as client:
        beside = client.post(PATH, {**STORY, "stream": True})
        client.read_head(beside)
        refused = client.start_post(PATH, **{"content-encoding": "gzip"})
        client.flush()
        assert client.read_head(refused)[":status"] == "415"
        assert b"error" in client.read_body(refused)
        for _ in range(PARTS):
            client.send_data(refused, b" " * 1000, end=False)
            client.flush()
        chunks = list(sse_events(client.chunks(beside)))
        assert chunks.pop() == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
        assert client.read_json(client.post(PATH, STORY))["choices"][0]["text"] == alone


def test_upload_that_nobody_reads_does_not_block_the_streams_beside_it(narrow_tiny_server: Server) -> None:
    """Over HTTP/2 all of it may be there before the answer is."""
    server = narrow_tiny_server
    alone = server.complete(**STORY)["choices"][0]["text"]
    with Http2Client(server.port, timeout=TIMEOUT) as client:
        beside = client.post(PATH, {**STORY, "stream": True})
        client.read_head(beside)
        refused = client.start_post("/nowhere")
        for _ in range(PARTS):
            client.send_data(refused, b" ", end=False)
        client.flush()
        assert client.read_head(refused)[":status"] == "404"
        chunks = list(sse_events(client.chunks(beside)))
        assert chunks.pop() == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
        assert client.read_json(client.post(PATH, STORY))["choices"][0]["text"] == alone


def test_large_upload_that_nobody_reads_leaves_no_connection_behind(narrow_tiny_server: Server) -> None:
    server = narrow_tiny_server
    server.wait_idle()
    clients = [server.connect() for _ in range(4)]
    for client in clients:
        client.get("/livez")
        client.read_head()
        client.read_body()
        client.next_exchange()
    descriptors = server.metrics().samples["process_open_fds"]
    for client in clients:
        client.send_bytes(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        client.send_bytes(b"content-length: 5000000\r\n\r\n")
        try:
            for _ in range(PARTS):
                client.send_bytes(b" " * 65536)
        except ConnectionError:
            pass  # it has been told no and hung up on
    server.wait_until(lambda now: now.samples["process_open_fds"] <= descriptors - len(clients))
