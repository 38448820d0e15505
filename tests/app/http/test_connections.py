"""What is patched in Hypercorn and cannot be brought about from outside; the rest is proved over real sockets."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import httpx
import pytest

from app.http.hypercorn import ServerConnection
from tests.support.harness import Server


class _FailingServer:
    async def run(self) -> None:
        raise ExceptionGroup("of a connection's task group", [RuntimeError("a bug")])


async def test_connection_that_fails_does_not_end_the_server_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ServerConnection, _FailingServer):
        def __init__(self, connected: socket.socket) -> None:
            self.stream = SimpleNamespace(socket=connected)

    with socket.socket() as connected:
        await Failing(connected).run()
    [record] = caplog.records
    assert record.exc_info is not None


def test_https_to_a_port_of_http_is_logged_in_words_and_not_each_time(server: Server) -> None:
    for _ in range(3):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{server.port}/livez", trust_env=False, verify=False)
    said = "A client spoke HTTPS, and this port is HTTP. What works: http:// in its URL"
    assert server.log.count(said) == 1
