"""Probes say what is: a hung engine is not alive, a busy one and an idle one are, and a dead one ends the process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration.chaos.faulty import Kind
from tests.integration.chaos.harness import ChaosServer, Start, prompt_of
from tests.support.raw_client import sse_events

STALL_LIMIT = 1.5  # seconds: many times what a step takes, even on a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[ChaosServer]:
    with ChaosServer("uvloop", stall_limit=STALL_LIMIT, max_num_seqs=2, max_queued_requests=3) as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.faults.clear()
        server.wait_idle()


def status(server: ChaosServer, path: str) -> int:
    return server.client.get(path).status_code


def wait_status(server: ChaosServer, path: str, expected: int) -> None:
    server.poll(lambda: status(server, path), lambda found: found == expected)


def test_hung_engine_fails_liveness_until_it_goes_on(server: ChaosServer) -> None:
    assert (status(server, "/livez"), status(server, "/readyz")) == (200, 200)
    with server.faults.during("slow", seconds=0.05):  # or it may have ended before the engine hangs
        stream = server.stream("hung", max_tokens=30).read_some()
        with server.faults.during("hang"):
            wait_status(server, "/livez", 503)
            assert status(server, "/readyz") == status(server, "/readyz?exclude=queue_full") == 503
            assert status(server, "/health") == 503
            assert status(server, "/startupz") == 200
            assert status(server, "/metrics") == 200, "everything that needs no engine is answered"
            assert status(server, "/v1/models") == 200
    wait_status(server, "/livez", 200)
    assert stream.read().done
    assert status(server, "/readyz") == 200
    assert stream.text == server.text_alone("hung", 30)


def test_hung_engine_is_not_alive_because_its_clients_have_given_up(server: ChaosServer) -> None:
    with server.faults.during("hang"):
        before = server.metrics()
        for number in range(3):  # none of them waits for as long as the limit
            client = server.stream(f"gone-{number}")
            time.sleep(STALL_LIMIT / 2)
            client.close()
        server.wait_until(lambda now: now.aborted == before.aborted + 3)
        assert status(server, "/livez") == 503
        assert status(server, "/readyz") == 503
    wait_status(server, "/livez", 200)


def test_busy_engine_is_alive_however_long_it_works(server: ChaosServer) -> None:
    with server.faults.during("slow", seconds=STALL_LIMIT / 5):
        streams = [server.stream(f"busy-{number}", max_tokens=90) for number in range(2)]
        until = time.monotonic() + 1.6 * STALL_LIMIT
        while time.monotonic() < until:
            assert status(server, "/livez") == 200
            assert status(server, "/readyz") == 200
            time.sleep(0.02)
        assert server.metrics().running == 2, "it was busy all the time"
    for stream in streams:
        assert stream.read().done


def test_idle_engine_is_alive_and_so_it_is_with_the_next_request(server: ChaosServer) -> None:
    server.wait_idle()
    time.sleep(1.2 * STALL_LIMIT)
    assert (status(server, "/livez"), status(server, "/readyz")) == (200, 200)
    with server.faults.during("slow", seconds=STALL_LIMIT / 5, times=1):
        stream = server.stream("after-idling", max_tokens=1)
        assert status(server, "/livez") == 200
        assert stream.read().done
    assert status(server, "/livez") == 200


def test_full_queue_is_not_ready_but_alive(server: ChaosServer) -> None:
    with server.faults.during("slow", seconds=0.1):
        running = [server.stream(f"seated-{number}", max_tokens=60).read_some() for number in range(2)]
        queued = [server.stream(f"queued-{number}", max_tokens=1) for number in range(3)]
        wait_status(server, "/readyz", 503)
        assert status(server, "/livez") == 200
        refused = server.post("/v1/completions", {"prompt": prompt_of("one too many")})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert status(server, "/readyz?exclude=queue_full") == 200
        assert status(server, "/readyz?exclude=engine") == 400
    for stream in running + queued:
        assert stream.read().done
    assert status(server, "/readyz") == 200


@pytest.mark.parametrize(
    ("worker_class", "start", "kind"),
    [
        ("uvloop", "hypercorn", "panic"),
        ("trio", "hypercorn.toml", "exit"),
        ("asyncio", "serve", "exit"),
        ("trio", "serve", "panic"),
    ],
)
def test_dead_engine_ends_streams_with_an_error_and_the_process_with_a_failure(
    worker_class: str, start: Start, kind: Kind
) -> None:
    with ChaosServer(worker_class, start, device="simulated", max_num_seqs=2) as server:
        server.wait_ready()
        running = [server.stream(f"running-{number}", max_tokens=8000).read_some() for number in range(2)]
        queued = server.stream("queued")
        background = server.post("/v1/responses", {"input": "Hi.", "background": True}).json()
        follower = server.connect()
        follower.get(f"/v1/responses/{background['id']}?stream=true")
        assert next(sse_events(follower.chunks()))["type"] == "response.created"
        server.wait_until(lambda now: now.waiting == 2)
        server.faults.order(kind)
        for stream in [*running, queued]:
            stream.read()
            assert stream.error is not None
            assert stream.error["code"] == "engine_dead"
            assert stream.done or stream.status == 503
        *_, last = sse_events(follower.chunks())
        assert last["type"] == "response.failed"
        assert "engine" in last["response"]["error"]["message"]
        assert server.wait_exit() != 0
        assert "engine" in server.log.splitlines()[-1]
