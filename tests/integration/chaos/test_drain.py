"""SIGTERM: no new work, what is in flight ends whole, and what cannot is told so."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.harness import ChaosServer, Start, Stream, prompt_of
from tests.support.harness import TIMEOUT
from tests.support.raw_client import sse_events

WAYS: list[tuple[str, Start]] = [
    ("uvloop", "hypercorn"),
    ("trio", "hypercorn"),
    ("asyncio", "hypercorn.toml"),
    ("uvloop", "serve"),
    ("trio", "serve"),
]


def start(worker_class: str, how: Start, **settings: Any) -> ChaosServer:
    """A server whose steps take a moment, so that there is something in flight."""
    server = ChaosServer(worker_class, how, device="simulated", max_num_seqs=3, **settings)
    server.faults.order("slow", seconds=0.01)
    return server


def fill(server: ChaosServer, max_tokens: int) -> list[Stream]:
    """Three streams that run and two that wait for their running slots."""
    with server.faults.during("slow", seconds=0.1):  # none ends before all are there, however slow this process is
        running = [server.stream(f"running-{number}", max_tokens=max_tokens) for number in range(3)]
        for stream in running:
            stream.read_some()
        queued = [server.stream(f"queued-{number}", max_tokens=10) for number in range(2)]
        server.wait_until(lambda now: now.waiting == 2)
    return running + queued


def wait_not_ready(server: ChaosServer) -> None:
    server.poll(lambda: server.client.get("/readyz").status_code, lambda status: status == 503)


@pytest.mark.parametrize(("worker_class", "how"), WAYS)
def test_everything_in_flight_ends_whole_and_nothing_new_begins(worker_class: str, how: Start) -> None:
    with start(worker_class, how) as server:
        server.wait_ready()
        texts = {stream.name: stream.text for stream in [s.read() for s in fill(server, max_tokens=60)]}
        with server.faults.during("slow", seconds=0.1):  # what is in flight is there until all of this has been seen
            streams = fill(server, max_tokens=60)
            idle = server.connect()
            if how == "hypercorn":
                os.killpg(server.pid, signal.SIGTERM)  # as systemd does it: to parent and worker alike
            else:
                os.kill(server.pid, signal.SIGTERM)

            wait_not_ready(server)
            assert server.client.get("/livez").status_code == 200
            with server.connect() as late:
                late.post("/v1/completions", {"prompt": prompt_of("late")})
                head = late.read_head()
                assert head.status_code == 503
                assert (b"connection", b"close") in head.headers
                assert b"shutting_down" in late.read_body()

        for stream in streams:
            stream.read()
            assert stream.done
            assert stream.error is None
        assert {stream.name: stream.text for stream in streams} == texts
        assert idle.read_raw() == b"", "an idle connection does not hold up the end"
        assert server.wait_exit() == 0


@pytest.mark.parametrize(("worker_class", "how"), WAYS[:2] + WAYS[-1:])
def test_what_does_not_end_in_time_is_told_so(worker_class: str, how: Start) -> None:
    with start(worker_class, how, drain_timeout=0.3) as server:
        if how == "serve":
            server.poll(lambda: listens(server.port), bool)
            os.kill(server.pid, signal.SIGHUP)  # while it imports: it means nothing yet
        server.wait_ready()
        streams = fill(server, max_tokens=1000)
        whole = server.connect()
        whole.post("/v1/completions", {"prompt": prompt_of("whole")})
        server.wait_until(lambda now: now.waiting == 3)
        server.faults.order("slow", seconds=0.1)
        os.kill(server.pid, signal.SIGTERM)
        for stream in streams:
            stream.read()
            assert stream.done
            assert stream.error is not None
            assert stream.error["code"] == "shutting_down"
        head = whole.read_head()
        assert head.status_code == 503
        assert (b"connection", b"close") in head.headers
        assert b"shutting_down" in whole.read_body()
        assert server.wait_exit() == 0
        assert "Drained. Requests cut at drain_timeout (0.3 s): 6" in server.log


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("worker_class", "drain_timeout", "last"), [("uvloop", 60, "incomplete"), ("trio", 0.3, "failed")]
)
def test_what_runs_in_the_background_is_drained_too_and_its_readers_are_told(
    worker_class: str, drain_timeout: float, last: str
) -> None:
    with start(worker_class, "hypercorn", drain_timeout=drain_timeout) as server:
        server.wait_ready()
        server.faults.order("slow", seconds=0.03)
        body = {"input": "Hi.", "ignore_eos": True, "max_output_tokens": 40 if last == "incomplete" else 4000}
        running = [server.post("/v1/responses", {**body, "background": True}).json()["id"] for _ in range(2)]
        readers = [server.connect() for _ in range(2)]
        for reader in readers:
            reader.get(f"/v1/responses/{running[0]}?stream=true")
            assert next(sse_events(reader.chunks()))["type"] == "response.created"
        os.kill(server.pid, signal.SIGTERM)
        for reader in readers:
            *_, event = sse_events(reader.chunks())
            assert event["type"] == f"response.{last}"
            assert last == "incomplete" or "shutting down" in event["response"]["error"]["message"]
        assert server.wait_exit() == 0


@pytest.mark.parametrize(("worker_class", "how"), WAYS[2:])
def test_second_signal_does_not_wait(worker_class: str, how: Start) -> None:
    with start(worker_class, how, drain_timeout=1000) as server:
        server.wait_ready()
        stream = server.stream("endless", max_tokens=1000).read_some()
        server.faults.order("slow", seconds=1)
        os.kill(server.pid, signal.SIGTERM)
        wait_not_ready(server)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit() == 128 + signal.SIGTERM
        assert "SIGTERM again: not waiting for the drain" in server.log
        assert not stream.done


@pytest.mark.parametrize(("worker_class", "how"), [WAYS[0], WAYS[-1]])
def test_hung_engine_does_not_hold_up_the_end(worker_class: str, how: Start) -> None:
    with start(worker_class, how, drain_timeout=0.2) as server:
        server.wait_ready()
        stream = server.stream("hung", max_tokens=1000).read_some()
        server.faults.order("hang")
        os.kill(server.pid, signal.SIGTERM)
        stream.read()
        assert stream.error is not None
        server.wait_exit()


@pytest.mark.parametrize(("worker_class", "how"), [WAYS[0]])
def test_worker_does_not_outlive_a_parent_that_is_killed(worker_class: str, how: Start) -> None:
    with start(worker_class, how) as server:
        server.wait_ready()
        stream = server.stream("orphan", max_tokens=1000).read_some()
        workers = children(server.pid)
        assert workers
        os.kill(server.pid, signal.SIGKILL)
        server.wait_exit()
        deadline = time.monotonic() + TIMEOUT
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_running, workers))
        assert not stream.done


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, before it was opened or before it was read
        return False
