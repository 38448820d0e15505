"""An engine whose model runs in processes of its own, under a real server: whichever of them goes, however it goes, its
streams end at once with an error that names it, nothing is left of the engine, and another one serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.harness import ChaosServer
from tests.integration.chaos.test_drain import children, is_running
from tests.integration.chaos.test_engine_process import engines, wait_gone


def start(**settings: Any) -> ChaosServer:
    return ChaosServer("uvloop", "serve", executor="mp", max_num_seqs=4, num_threads=1, **settings)


def ranks(server: ChaosServer) -> list[int]:
    """The process ids of its engines' ranks, from when they are that: before, they are copies of an engine, for as long
    as one system call takes."""
    return [
        pid
        for engine in engines(server)
        for pid in children(engine)
        if is_running(pid) and b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[ChaosServer]:
    with start() as started:
        yield started.wait_ready()


def strike(server: ChaosServer, number: signal.Signals, victim: int | None = None) -> None:
    """A rank goes, or the engine. Within the time that a client would wait anyway, another engine serves."""
    before = [*engines(server), *ranks(server)]
    os.kill(victim or ranks(server)[-1], number)
    server.poll(lambda: server.client.get("/livez").status_code, lambda status: status == 503)
    assert server.client.get("/readyz").status_code == 503
    wait_gone(before)
    server.poll(lambda: server.client.get("/readyz").status_code, lambda status: status == 200)
    assert server.client.get("/livez").status_code == 200
    assert set(before).isdisjoint(ranks(server))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_goes_while_it_decodes_is_named_in_every_stream(
    server: ChaosServer, number: signal.Signals
) -> None:
    expected = server.text_alone("alone", 20)
    with server.faults.during("slow", seconds=0.01):
        streams = [server.stream(f"stream-{each}", max_tokens=4000).read_some() for each in range(3)]
        strike(server, number)
    for stream in streams:
        stream.read()
        assert stream.error is not None
        assert stream.error["code"] == "rank_lost"
        assert f"rank {len(ranks(server)) - 1} on {os.uname().nodename}" in stream.error["message"]
        assert number.name in stream.error["message"]
        assert stream.done
    assert server.text_alone("alone", 20) == expected


def test_a_signal_to_the_whole_group_is_for_the_server_alone(server: ChaosServer) -> None:
    processes = [*engines(server), *ranks(server)]
    with server.faults.during("slow", seconds=0.01):
        stream = server.stream("deaf", max_tokens=100).read_some()
        os.killpg(server.pid, signal.SIGHUP)
    assert stream.read().error is None
    assert processes == [*engines(server), *ranks(server)]


def test_a_rank_that_goes_while_nothing_runs_is_missed_at_once(server: ChaosServer) -> None:
    server.wait_idle()
    strike(server, signal.SIGKILL)
    assert server.complete([5, 6, 7], max_tokens=4)["choices"][0]["text"]


def test_an_engine_that_is_stopped_goes_with_its_ranks_and_another_serves(server: ChaosServer) -> None:
    with server.faults.during("slow", seconds=0.01):
        stream = server.stream("cut", max_tokens=4000).read_some()
        strike(server, signal.SIGSTOP, engines(server)[0])
    assert stream.read().error is not None
    assert stream.done
    assert server.complete([5, 6, 7], max_tokens=4)["choices"][0]["text"]


def test_one_engine_of_two_loses_a_rank_and_the_other_goes_on() -> None:
    with start(data_parallel_size=2) as pair:
        pair.wait_ready()
        with pair.faults.during("slow", seconds=0.01):
            streams = [pair.stream(f"stream-{each}", max_tokens=300).read_some() for each in range(4)]
            os.kill(ranks(pair)[0], signal.SIGKILL)
        failed = [stream for stream in streams if stream.read().error is not None]
        assert 0 < len(failed) < 4
        assert {stream.error["code"] for stream in failed if stream.error} == {"rank_lost"}
        assert all(stream.done for stream in streams)
        assert pair.client.get("/livez").status_code == 200
        pair.poll(lambda: pair.log, lambda log: "runs again" in log)


@pytest.mark.parametrize(("who", "phase"), [("engine", "serving"), ("server", "loading")])
def test_ranks_do_not_outlive_who_they_belong_to(who: str, phase: str) -> None:
    with start() as server:
        if phase == "serving":
            server.wait_ready()
            server.stream("orphan", max_tokens=4000).read_some()
        found = server.poll(lambda: ranks(server), bool)
        os.kill(found[0], signal.SIGSTOP)  # not even one that could not notice
        os.kill(server.pid if who == "server" else engines(server)[0], signal.SIGKILL)
        wait_gone(found)
        assert not segments()


def segments() -> list[str]:
    """Shared memory with a name."""
    return [name for name in os.listdir("/dev/shm") if "headrace" in name]
