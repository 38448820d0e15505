"""Random clients that are killed at random moments: afterwards the server is what it was, to the block.

A kill takes a fresh connection, asks for something that would never end by itself, and leaves by FIN or RST at a moment
of its own. Between the kills there are survivors, greedy requests that read on to their end, and refused ones. The
server's metrics are compared with those of the clients.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from tests.support.harness import Metrics, Server
from tests.support.raw_client import RawClient, sse_events
from tests.support.tiny_model import tiny_server
from tests.support.victims import PATH, endless

CLIENTS = 12  # at once; more than there are running slots
SURVIVOR = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SURVIVOR_PROMPTS = [f"The {thing} stands beside the headrace and" for thing in ("mill", "oak", "house", "cow", "boy")]
SHARED_PREFIX = [random.Random(7).randrange(1000, 40000) for _ in range(200)]
KEPT_TIMELINES = 1000  # ended requests that the server remembers, before its memory can be expected to stand still


@pytest.fixture
def storm_server() -> Iterator[Server]:
    with tiny_server(
        max_num_seqs=8, max_num_batched_tokens=64, timeline_size=KEPT_TIMELINES, pipeline_depth=2
    ) as server:
        yield server.wait_ready()


@pytest.fixture
def real_storm_server() -> Iterator[Server]:
    with Server(max_num_seqs=8, max_num_batched_tokens=64, timeline_size=KEPT_TIMELINES) as server:
        yield server.wait_ready()


def test_hundreds_of_random_kills_leave_the_server_as_it_was(storm_server: Server) -> None:
    check_storm(storm_server, kills=300, warm_up=60, memory_growth=32 * 2**20)


@pytest.mark.storm
def test_ten_thousand_random_kills_leave_the_server_as_it_was(storm_server: Server) -> None:
    check_storm(storm_server, kills=10_000, warm_up=6 * KEPT_TIMELINES, memory_growth=10 * 2**20)


@pytest.mark.storm
def test_random_kills_of_the_real_model_leave_the_server_as_it_was(real_storm_server: Server) -> None:
    _touch_every_block(real_storm_server, num_tokens=6_000)
    check_storm(real_storm_server, kills=300, warm_up=100, memory_growth=32 * 2**20)


def check_storm(server: Server, kills: int, warm_up: int, memory_growth: int) -> None:
    seed = int(os.environ.get("STORM_SEED", "20260801"))
    expected = {prompt: server.complete(prompt, **SURVIVOR)["choices"][0]["text"] for prompt in SURVIVOR_PROMPTS}
    Storm(server, seed, expected).rage(warm_up)
    before = _settle(server)

    started = time.monotonic()
    storm = Storm(server, seed + 1, expected)
    storm.rage(kills)
    seconds = time.monotonic() - started
    after = _settle(server, descriptors=before.samples["process_open_fds"])

    ended = {reason: after.finished[reason] - before.finished[reason] for reason in after.finished}
    growth = after.samples["process_resident_memory_bytes"] - before.samples["process_resident_memory_bytes"]
    print(f"{kills} kills in {seconds:.0f} s: {dict(storm.count)}; {ended}; RSS {growth / 2**20:+.1f} MiB; seed {seed}")

    counted = storm.count
    requests = _http_requests(after) - _http_requests(before)
    assert counted["killed"] == kills
    assert counted["wrong text"] == 0
    assert ended["length"] == counted["survived"]
    assert ended["stop"] == ended["error"] == ended["timeout"] == 0
    # What the server has seen of the rest it has accepted, and then aborted. Only a reset can overtake its request.
    assert ended["abort"] == requests - counted["survived"] - counted["refused"]
    assert counted["certainly accepted"] <= ended["abort"] <= kills
    assert after.samples["process_open_fds"] == before.samples["process_open_fds"]
    assert growth < memory_growth
    for prompt, text in expected.items():
        assert server.complete(prompt, **SURVIVOR)["choices"][0]["text"] == text

    assert server.stop() == 0
    assert "Draining, requests in flight: 0" in server.log
    assert "Traceback" not in server.log, server.log


class Storm:
    """Many clients at once. `count` is what they have done and seen."""

    def __init__(self, server: Server, seed: int, expected: dict[str, str]) -> None:
        self.count: Counter[str] = Counter()
        self._server = server
        self._seed = seed
        self._expected = expected
        self._lock = threading.Lock()

    def rage(self, kills: int) -> None:
        """Kill this many clients, and let every tenth beside them survive or be refused."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(self._one, range(kills)):
                pass

    def _one(self, number: int) -> None:
        generator = random.Random(self._seed * 1_000_003 + number)
        if number % 10 == 0:
            self._survive(generator)
        if number % 25 == 0:
            self._be_refused()
        self._be_killed(generator)

    def _be_killed(self, generator: random.Random) -> None:
        body = self._victim(generator)
        reset = generator.random() < 0.5
        moment = generator.choice(["at once", "soon", "later", "with headers", "with text"])
        client = self._server.connect()
        client.post(PATH, body)
        certain = not reset  # a FIN comes after the request, always
        if moment in ("with headers", "with text") and body["stream"]:
            certain = True
            assert client.read_head().status_code == 200
            if moment == "with text":
                events = sse_events(client.chunks())
                for _ in range(generator.randrange(1, 6)):
                    next(events)
        elif moment != "at once":
            time.sleep(generator.uniform(0, 0.01 if moment == "soon" else 0.1))
        (RawClient.leave_with_rst if reset else RawClient.leave_with_fin)(client)
        self._note("killed", *(["certainly accepted"] if certain else []))

    @staticmethod
    def _victim(generator: random.Random) -> dict[str, Any]:
        num_tokens = generator.choice([5, 40, 300, 1500])
        body = endless(num_tokens, stream=generator.random() < 0.5, n=generator.choice([1, 1, 2, 4]))
        if generator.random() < 0.3:
            body["prompt"] = SHARED_PREFIX[: generator.randrange(20, 200)] + body["prompt"]
        body["max_tokens"] = 2000
        return body

    def _survive(self, generator: random.Random) -> None:
        prompt = generator.choice(SURVIVOR_PROMPTS)
        stream = generator.random() < 0.5
        with self._server.connect() as client:
            client.post(PATH, {"prompt": prompt, "stream": stream, **SURVIVOR})
            assert client.read_head().status_code == 200
            if stream:
                *chunks, done = sse_events(client.chunks())
                assert done == "[DONE]"
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            else:
                text = orjson.loads(client.read_body())["choices"][0]["text"]
        self._note("survived", *([] if text == self._expected[prompt] else ["wrong text"]))

    def _be_refused(self) -> None:
        with self._server.connect() as client:
            client.post(PATH, {"prompt": "a", "temperature": -1})
            assert client.read_head().status_code == 400
        self._note("refused")

    def _note(self, *what: str) -> None:
        with self._lock:
            self.count.update(what)


def _touch_every_block(server: Server, num_tokens: int) -> None:
    """The kernel gives memory to the KV cache when it is first written: all 256 MiB of it now, and not later."""
    while num_tokens > 0:
        prompt = endless(1000, stream=False)["prompt"]
        server.complete(prompt, max_tokens=1)
        num_tokens -= len(prompt)


def _settle(server: Server, descriptors: float | None = None) -> Metrics:
    """Wait until nothing runs, waits, owns a block or is connected, and the metrics have stopped moving."""
    server.wait_idle()
    if descriptors is not None:
        server.wait_until(lambda now: now.samples["process_open_fds"] <= descriptors)
    last = server.metrics()
    while True:
        time.sleep(0.2)
        now = server.wait_idle()
        if (now.finished, _http_requests(now)) == (last.finished, _http_requests(last)) and (
            now.samples["process_open_fds"] == last.samples["process_open_fds"]
        ):
            return now
        last = now


def _http_requests(metrics: Metrics) -> int:
    return sum(metrics.http_requests(PATH, status) for status in ("2xx", "4xx", "5xx"))
