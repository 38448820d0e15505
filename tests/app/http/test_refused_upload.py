"""An upload that is refused before it has arrived costs nobody anything: neither its connection nor the server."""

from __future__ import annotations

import pytest

from tests.selection import slow_except
from tests.support.harness import Server

PARTS = 50  # of a body; more than Hypercorn queues

pytestmark = pytest.mark.parametrize(
    "narrow_tiny_server", slow_except(["uvloop", "asyncio", "trio"], "uvloop"), indirect=True, scope="session"
)


@pytest.mark.slow
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
