"""Through a proxy at its defaults nothing is lost: who leaves is aborted, what is said arrives, what idles stays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.http.test_client_gone import LEAVING, PHASES, SLOTS, case_name, check_client_gone_behind
from tests.support.harness import Server
from tests.support.nginx import IMPATIENT_TIMEOUT, Nginx
from tests.support.raw_client import sse_events
from tests.support.victims import PATH, endless

HYPERCORNS_OWN_KEEP_ALIVE = 5  # seconds, where nobody configures it; nginx keeps its pool for 60
HYPERCORNS_OWN_MAX_REQUESTS = 1000  # on one connection

_CASES = list(itertools.product(PHASES, [True, False], LEAVING))

pytestmark = pytest.mark.parametrize("narrow_tiny_server", ["uvloop"], indirect=True, scope="session")


@pytest.fixture(scope="module")
def nginx(narrow_tiny_server: Server) -> Iterator[Nginx]:
    with Nginx(narrow_tiny_server.port) as running:
        yield running
        assert "prematurely closed" not in running.error_log
        assert "reset by peer" not in running.error_log


@pytest.mark.parametrize(("phase", "stream", "how"), _CASES, ids=case_name)
def test_client_gone_behind_the_proxy_is_aborted(
    narrow_tiny_server: Server, nginx: Nginx, phase: str, stream: bool, how: str
) -> None:
    check_client_gone_behind(nginx.connect, narrow_tiny_server, phase, stream, how)


def test_stream_says_the_same_through_the_proxy(narrow_tiny_server: Server, nginx: Nginx) -> None:
    body: dict[str, Any] = {"prompt": "A headrace is", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = narrow_tiny_server.complete(**body)["choices"][0]["text"]
    with nginx.connect() as client:
        client.post(PATH, {**body, "stream": True})
        assert client.read_head().status_code == 200
        *chunks, done = sse_events(client.chunks())
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_headers_and_comments_keep_a_queued_stream_alive_and_are_not_buffered(
    narrow_tiny_server: Server, nginx: Nginx
) -> None:
    """It waits for twice as long as the proxy lets an answer be silent, and is answered all the same."""
    server = narrow_tiny_server
    with server.connect() as crowd, nginx.connect_impatient() as client, nginx.connect_impatient() as silent:
        crowd.post(PATH, endless(stream=True, n=SLOTS))
        server.wait_until(lambda now: now.running == SLOTS)
        body: dict[str, Any] = {"prompt": "A headrace is", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        silent.post(PATH, body)
        client.post(PATH, {**body, "stream": True})
        assert client.read_head().status_code == 200
        began = time.monotonic()
        chunks = client.chunks()
        while time.monotonic() < began + 2 * IMPATIENT_TIMEOUT:
            comment = next(chunks)
            assert comment.startswith(b":"), "a comment, and by itself: nothing holds it back"
        now = server.metrics()
        assert now.waiting == 1, "the one that was not a stream has been given up by the proxy, and aborted"
        assert now.running == SLOTS
        assert silent.read_head().status_code == 504
        crowd.leave_with_rst()
        *events, done = sse_events(chunks)
        assert done == "[DONE]"
        text = "".join(event["choices"][0]["text"] for event in events)
    assert text == server.complete(**body)["choices"][0]["text"]
    server.wait_idle()


def test_first_event_is_through_while_the_next_are_made(narrow_tiny_server: Server, nginx: Nginx) -> None:
    with nginx.connect() as client:
        client.post(PATH, endless(stream=True))
        assert client.read_head().status_code == 200
        next(sse_events(client.chunks()))
        assert narrow_tiny_server.metrics().running == 1
    narrow_tiny_server.wait_idle()


def test_pooled_connections_are_used_again_and_again_and_never_reset(narrow_tiny_server: Server, nginx: Nginx) -> None:
    """More often than Hypercorn's own limit, and after idling for longer than its own timer."""
    narrow_tiny_server.wait_idle()
    with nginx.connect() as client:

        def ask(times: int) -> None:
            for _ in range(times):
                client.get("/v1/models")
                assert client.read_head().status_code == 200
                client.read_body()
                client.next_exchange()

        ask(HYPERCORNS_OWN_MAX_REQUESTS - 100)  # nginx, too, ends a client's connection after 1,000
        pool = nginx.pooled_connections()
    assert pool
    time.sleep(HYPERCORNS_OWN_KEEP_ALIVE + 0.5)
    with nginx.connect() as client:
        ask(200)
        assert nginx.pooled_connections() == pool
