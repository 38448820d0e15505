"""A client that reads nothing is cut in the end, and until then costs bounded memory and nobody else's time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.answers import KEEP_ALIVE
from tests.integration.chaos.harness import ChaosServer, prompt_of
from tests.support.harness import Metrics

SEND_TIMEOUT = 1.5  # seconds
KEPT_ALIVE_EVERY = 0.1  # seconds
LITTLE = 4096  # bytes that the client's kernel takes for it
MIB = 2**20
# Some kilobytes a step: more than kernels and transport hold, long before the last token.
FLOOD = {"n": 6, "logprobs": 1, "max_tokens": 3000, "receive_buffer": LITTLE}


EVERY_LOOP = pytest.mark.parametrize("server", ["uvloop", "asyncio", "trio"], indirect=True, scope="module")
BOTH_KINDS = pytest.mark.parametrize("server", ["uvloop", "trio"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ChaosServer]:
    settings: dict[str, Any] = {"send_timeout": SEND_TIMEOUT, "sse_keep_alive": KEPT_ALIVE_EVERY, "max_num_seqs": 64}
    with ChaosServer(request.param, "hypercorn.toml", device="simulated", **settings) as running:
        yield running.wait_ready()


@pytest.fixture
def before(server: ChaosServer) -> Iterator[Metrics]:
    yield server.wait_idle()
    server.faults.clear()


def memory_of(server: ChaosServer) -> int:
    """Resident bytes of the process that serves."""
    [line] = [line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def requests_logged(server: ChaosServer, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "request" and line["request_id"] == name]


def wait_cut(server: ChaosServer, name: str) -> None:
    [line] = server.poll(lambda: requests_logged(server, name), bool)
    assert line["error"] == "client_stalled"


@EVERY_LOOP
def test_clients_that_do_not_read_are_cut_and_nobody_else_is(server: ChaosServer, before: Metrics) -> None:
    texts = {f"reads-{number}": server.text_alone(f"reads-{number}", 150) for number in range(3)}
    before = server.wait_idle()
    memory = memory_of(server)
    stalled = [server.stream(f"stalled-{number}", **FLOOD).read_some() for number in range(6)]
    readers = [server.stream(name, max_tokens=150) for name in texts]
    for reader in readers:
        assert reader.read().done
    assert {reader.name: reader.text for reader in readers} == texts

    after = server.wait_until(lambda now: now.aborted == before.aborted + len(stalled))
    assert memory_of(server) - memory < 64 * MIB
    for stream in stalled:
        wait_cut(server, stream.name)
        with pytest.raises((ConnectionResetError, AssertionError)):  # what it gets when it reads after all
            stream.read()
        assert not stream.done
    after = server.wait_idle()
    assert after.finished["length"] == before.finished["length"] + len(readers)
    assert after.finished["error"] == 0


@BOTH_KINDS
def test_client_that_reads_slowly_is_not_cut(server: ChaosServer, before: Metrics) -> None:
    """It is behind all the time, for longer than a client may read nothing."""
    stream = server.stream("slow", n=6, logprobs=1, max_tokens=500, receive_buffer=LITTLE)
    stream.read_some()
    until = time.monotonic() + 1.5 * SEND_TIMEOUT
    while time.monotonic() < until and not stream.done:
        for _ in range(20):
            stream.read_event()
        time.sleep(0.05)
    stream.read()
    assert stream.done
    assert stream.error is None


@BOTH_KINDS
def test_whole_answer_that_nobody_reads_is_cut_too(server: ChaosServer, before: Metrics) -> None:
    body = {"prompt": prompt_of("whole"), "n": 16, "logprobs": 1, "max_tokens": 250, "ignore_eos": True}
    with server.connect(receive_buffer=LITTLE) as client:
        client.post("/v1/completions", body, {"x-request-id": "whole"})
        wait_cut(server, "whole")
    server.wait_idle()


@BOTH_KINDS
def test_whole_answer_that_is_read_slowly_arrives(server: ChaosServer, before: Metrics) -> None:
    """It takes longer than a client may read nothing, and none of its pieces does."""
    body = {"prompt": prompt_of("slowly"), "n": 16, "logprobs": 1, "max_tokens": 250, "ignore_eos": True}
    with server.connect(receive_buffer=LITTLE) as client:
        client.post("/v1/completions", body)
        head = client.read_head()
        length = int(dict(head.headers)[b"content-length"])
        answer = b""
        for chunk in client.chunks():
            answer += chunk
            time.sleep(2 * SEND_TIMEOUT * len(chunk) / length)
    assert len(answer) == length
    assert len(json.loads(answer)["choices"]) == 16


@EVERY_LOOP
def test_client_that_closes_its_side_without_reading_is_gone(server: ChaosServer, before: Metrics) -> None:
    """Its socket stays open and full, so nothing that is sent to it ever ends."""
    stream = server.stream("half-closed", **FLOOD).read_some()
    server.wait_until(lambda now: now.generation_tokens > before.generation_tokens + 6 * 150)
    stream.client.end_of_requests()
    server.wait_until(lambda now: now.aborted == before.aborted + 1)
    server.wait_idle()


@BOTH_KINDS
def test_silent_streams_are_kept_alive(server: ChaosServer, before: Metrics) -> None:
    began = time.monotonic()
    with server.faults.during("hang"):
        streams = [server.stream("prefilling", max_tokens=1), server.stream("queued", max_tokens=1)]
        for stream in streams:
            assert stream.client.read_head().status_code == 200
            chunks = stream.client.chunks()
            assert [next(chunks) for _ in range(3)] == 3 * [KEEP_ALIVE]
    for stream in streams:
        rest = stream.client.read_body()
        assert rest.endswith(b"data: [DONE]\n\n")
        sent = 3 + rest.count(KEEP_ALIVE)
        assert sent <= 1 + (time.monotonic() - began) / KEPT_ALIVE_EVERY, "not beside events, and not more often"


@pytest.mark.parametrize("worker_class", ["uvloop", "trio"])
def test_connection_is_closed_when_nothing_follows_its_stream(worker_class: str) -> None:
    """The end of a stream starts the keep-alive timer, or clients that keep quiet would use up the sockets."""
    with ChaosServer(worker_class, device="simulated", flags=("--keep-alive", "1")) as server:
        server.wait_ready()
        stream = server.stream("quiet", max_tokens=3).read()
        assert stream.done
        assert stream.client.read_raw() == b""
