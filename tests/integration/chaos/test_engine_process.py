"""The engine in a process of its own, under a real server: whichever of the two is killed or hangs, nothing is left.

And with several engines, one that dies is nobody's business but that of its own streams.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.harness import ChaosServer, Start, Stream
from tests.integration.chaos.test_drain import children, is_running
from tests.support.harness import TIMEOUT


def start(worker_class: str = "uvloop", how: Start = "serve", **settings: Any) -> ChaosServer:
    """A server with engine processes whose steps take a moment, so that there is something in flight."""
    server = ChaosServer(worker_class, how, device="simulated", engine="process", **settings)
    server.faults.order("slow", seconds=0.01)
    return server


def engines(server: ChaosServer) -> list[int]:
    """The process ids of its engines."""
    return [
        pid for pid in _descendants(server.pid) if b"tests.integration.chaos.engine_process" in _read(pid, "cmdline")
    ]


def wait_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, processes))


@pytest.mark.parametrize(("worker_class", "how"), [("uvloop", "hypercorn"), ("trio", "serve")])
def test_killed_engine_ends_streams_with_an_error_and_the_server_with_a_failure(worker_class: str, how: Start) -> None:
    with start(worker_class, how, max_num_seqs=2) as server:
        server.wait_ready()
        running = [server.stream(f"running-{number}", max_tokens=900).read_some() for number in range(2)]
        queued = server.stream("queued")
        server.wait_until(lambda now: now.waiting == 1)
        (engine,) = engines(server)
        os.kill(engine, signal.SIGKILL)
        for stream in [*running, queued]:
            stream.read()
            assert stream.error is not None
            assert stream.error["code"] == "engine_dead"
            assert stream.done or stream.status == 503
        assert server.wait_exit() != 0
        assert "killed by SIGKILL" in server.log
        assert server.log.splitlines()[-1] == "error: the engine has died while serving"


def test_engine_that_panics_says_why_before_it_ends() -> None:
    with start() as server:
        server.wait_ready()
        stream = server.stream("unlucky", max_tokens=900).read_some()
        server.faults.order("exit")
        assert stream.read().done
        assert stream.error is not None
        assert server.wait_exit() != 0
        assert "a fault was ordered" in server.log
        assert "in _strike" in server.log, "with the traceback of the engine's process"


@pytest.mark.parametrize(("worker_class", "how"), [("uvloop", "hypercorn"), ("trio", "serve")])
def test_engines_do_not_outlive_a_server_that_is_killed(worker_class: str, how: Start) -> None:
    with start(worker_class, how, data_parallel_size=2) as server:
        server.wait_ready()
        server.stream("orphan", max_tokens=1000).read_some()
        processes = engines(server)
        assert len(processes) == 2
        os.kill(server.pid, signal.SIGKILL)
        server.wait_exit()
        wait_gone(processes)


@pytest.mark.parametrize(("worker_class", "how"), [("trio", "hypercorn"), ("uvloop", "serve")])
def test_sigterm_to_the_whole_group_lets_everything_in_flight_end_whole(worker_class: str, how: Start) -> None:
    with start(worker_class, how, max_num_seqs=3) as server:
        server.wait_ready()
        with server.faults.during("slow", seconds=0.1):  # none ends before the signal has come
            streams = [server.stream(f"stream-{number}", max_tokens=60).read_some() for number in range(3)]
            queued = server.stream("queued", max_tokens=10)
            server.wait_until(lambda now: now.waiting == 1)
            processes = engines(server)
            os.killpg(server.pid, signal.SIGTERM)
        for stream in [*streams, queued]:
            stream.read()
            assert stream.done
            assert stream.error is None
        assert server.wait_exit() == 0
        wait_gone(processes)


def test_hung_engine_fails_liveness_and_does_not_hold_up_the_end() -> None:
    with start(stall_limit=1.0, drain_timeout=0.2) as server:
        server.wait_ready()
        stream = server.stream("hung", max_tokens=150).read_some()
        with server.faults.during("hang"):
            _wait_status(server, "/livez", 503)
            assert server.client.get("/readyz").status_code == 503
            assert server.client.get("/metrics").status_code == 200
        _wait_status(server, "/livez", 200)
        assert stream.read().done

        stream = server.stream("hung again", max_tokens=1000).read_some()
        server.faults.order("hang")
        os.kill(server.pid, signal.SIGTERM)
        assert stream.read().error is not None
        server.wait_exit()


@pytest.fixture(scope="module")
def pair() -> Iterator[ChaosServer]:
    with start(data_parallel_size=2, max_num_seqs=4) as server:
        yield server.wait_ready()


def test_stopped_engine_of_two_is_killed_takes_its_own_streams_and_comes_back(pair: ChaosServer) -> None:
    alone = {f"one-{number}": pair.text_alone(f"one-{number}", 60) for number in range(8)}
    before = pair.metrics()
    with pair.faults.during("slow", seconds=0.1):  # none ends before the engine does
        streams = [pair.stream(name, max_tokens=60).read_some() for name in alone]
        victim, _ = processes = engines(pair)
        os.kill(victim, signal.SIGSTOP)
    failed = [stream for stream in streams if stream.read().error is not None]
    assert len(failed) == 4, "each has four running slots, and nobody waits for one while there are others"
    for stream in streams:
        assert stream.done
        if stream in failed:
            assert stream.error is not None
            assert stream.error["code"] == "request_failed"
        else:
            assert stream.text == alone[stream.name]
    assert pair.client.get("/readyz").status_code == 200
    assert pair.client.get("/livez").status_code == 200
    assert pair.text_alone("one-0", 60) == alone["one-0"]

    pair.poll(lambda: pair.log, lambda log: "runs again" in log)
    assert len(engines(pair)) == 2
    assert set(engines(pair)) != set(processes)
    streams = [pair.stream(name, max_tokens=60) for name in alone]
    assert {stream.name: stream.read().text for stream in streams} == alone
    after = pair.wait_idle()
    assert after.finished["error"] == before.finished["error"] + 4


def test_metrics_of_two_engines_are_their_sums(pair: ChaosServer) -> None:
    before = pair.wait_idle()
    with pair.faults.during("slow", seconds=0.1):  # the first has not ended when the last is seen
        streams: list[Stream] = [pair.stream(f"sum-{number}", max_tokens=50) for number in range(8)]
        pair.wait_until(lambda now: now.running == 8 and now.waiting == 0)  # four running slots each
    for stream in streams:
        assert stream.read().done
    after = pair.wait_idle()
    assert after.generation_tokens == before.generation_tokens + 400
    assert after.prompt_tokens == before.prompt_tokens + 64
    assert after.computed_tokens == before.computed_tokens + 64


def test_the_front_end_holds_nothing_that_computes_and_says_how_far_the_engine_is() -> None:
    with ChaosServer("uvloop", "serve", engine="process", api_keys="sk-one") as server:
        server.client.headers["authorization"] = "Bearer sk-one"
        server.wait_ready()
        (engine,) = engines(server)
        computes = (b"gpu/cpu/_kernels", b"libtorch")  # the library, or what serves where there is none
        assert any(name in _read(engine, "maps") for name in computes)
        assert not any(name in _read(server.pid, "maps") for name in computes)
        assert b"sk-one" in _read(server.pid, "environ")
        assert b"sk-one" not in _read(engine, "environ"), "it needs no keys, so it gets none"
        assert "Loading weights" in server.log
        assert len(server.complete([5, 6, 7], max_tokens=4)["choices"][0]["text"])
        assert server.stop() == 0


def _wait_status(server: ChaosServer, path: str, expected: int) -> None:
    server.poll(lambda: server.client.get(path).status_code, lambda found: found == expected)


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [pid for child in below for pid in _descendants(child)]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return b""
