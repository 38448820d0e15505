"""On Ray Serve, behind its proxy, a server keeps its promises: who leaves is aborted, and what is said arrives."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from tests.app.http.test_client_gone import LEAVING, PHASES, SLOTS, case_name, check_client_gone_behind
from tests.integration.cluster.serve import ServeOnRay
from tests.integration.cluster.streams import keep_busy, num_streamed
from tests.support.raw_client import sse_events
from tests.support.tiny_model import write_tiny_model
from tests.support.victims import PATH, endless

NUM_TOKENS = 20_000  # of a stream that outlives a replica's being wanted
LONG = 56_000  # tokens of a prompt: an abort comes here by way of a proxy that may have to wait for a processor
NARROW: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_memory": "48MiB",
    "max_model_len": 65536,
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": 16,
}

_CASES = list(itertools.product(PHASES, [True, False], LEAVING))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeOnRay]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=65536)
    with ServeOnRay({"min_replicas": 1, "max_replicas": 1}, model=model, **NARROW) as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize(("phase", "stream", "how"), _CASES, ids=case_name)
def test_client_gone_behind_serves_proxy_is_aborted(server: ServeOnRay, phase: str, stream: bool, how: str) -> None:
    check_client_gone_behind(server.connect, server, phase, stream, how, LONG)


def test_a_stream_says_the_same_and_a_refusal_comes_as_it_is(server: ServeOnRay) -> None:
    body: dict[str, Any] = {"prompt": "A headrace is", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = server.complete(**body)["choices"][0]["text"]
    with server.connect() as client:
        client.post(PATH, {**body, "stream": True})
        assert client.read_head().status_code == 200
        *chunks, done = sse_events(client.chunks())
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    refused = server.post(PATH, {**body, "temperature": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


def test_a_stopped_replica_is_killed_and_replaced(server: ServeOnRay) -> None:
    """Its stream is cut, and who comes later is served."""
    server.wait_idle()
    [first] = server.replicas()
    with server.connect() as client:
        client.post(PATH, endless(stream=True))
        assert client.read_head().status_code == 200
        next(sse_events(client.chunks()))
        os.kill(first, signal.SIGSTOP)
        with pytest.raises((h11.RemoteProtocolError, ConnectionError)):
            list(client.chunks())
    server.poll(server.replicas, lambda now: len(now) == 1 and now != [first], 0.1)
    server.wait_ready()
    assert server.complete("A headrace is", max_tokens=3)["usage"]["completion_tokens"] == 3
    server.wait_idle()


class _Told:
    def __init__(self, **metrics: list[float]) -> None:
        self.aggregated_metrics = {name: dict(enumerate(values)) for name, values in metrics.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, when it is imported
@pytest.mark.parametrize(
    ("queued", "running", "wanted"),
    [
        ([], [], 0),  # Serve's minimum goes before
        ([0.0], [0.2], 1),
        ([0.0], [1.0], 2),  # nobody waits, but the next one would
        ([0.5, 0.5], [1.0, 1.0], 3),
        ([8.0, 8.0], [1.0, 1.0], 11),
        ([0.0, 0.0, 0.0], [0.3, 0.1, 0.0], 1),
    ],
)
def test_there_are_as_many_replicas_as_the_queues_ask_for(
    queued: list[float], running: list[float], wanted: int
) -> None:
    from app.ray_serve import QueuedSeconds

    told: Any = _Told(queued_seconds=queued, running_share=running)
    assert QueuedSeconds(max_queued_seconds=2.0)(told) == (wanted, {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("leaves", [True, False])
def test_who_leaves_before_a_replica_is_found_is_no_load(leaves: bool) -> None:
    """Serve says nothing more of him."""
    from app.ray_serve import HeadraceRouter

    replica: Any = SimpleNamespace(replica_id="one", routing_stats={})
    router: Any = object.__new__(HeadraceRouter)
    router.initialize_state()
    router._numbers["one"] = 0

    async def ask() -> None:
        future = asyncio.get_running_loop().create_future()
        told = SimpleNamespace(internal_request_id="request", session_id="")
        assert await router.choose_replicas([replica], SimpleNamespace(metadata=told, future=future)) == [[replica], []]
        assert router._policy.loads[0] > 0
        if leaves:
            future.cancel()
        else:
            future.set_result(replica)
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert (router._policy.loads[0] == 0) == leaves


@pytest.mark.storm
def test_replicas_follow_the_queue_and_one_that_goes_finishes_its_streams(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", max_position_embeddings=65536)
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "look_back_period_s": 11,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
    }
    settings: dict[str, Any] = {**NARROW, "max_num_seqs": 8, "drain_timeout": 900, "max_queue_time": 0}
    with ServeOnRay(scaling, model=model, **settings) as server, ThreadPoolExecutor(4) as readers:
        server.wait_ready()
        with keep_busy(server, 16):
            server.poll(partial(_served_by_replica, server), lambda now: len(now) == 2, 0.1)
            streams = [readers.submit(num_streamed, server, number, NUM_TOKENS) for number in range(4)]
        assert [stream.result() for stream in streams] == [NUM_TOKENS] * 4
        server.poll(server.replicas, lambda now: len(now) == 1, 0.1)
        assert server.complete("A headrace is", max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.storm
def test_a_session_stays_with_its_replica_and_one_that_has_gone_is_chosen_no_more(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", max_position_embeddings=65536)
    with ServeOnRay({"min_replicas": 2, "max_replicas": 2}, model=model, **NARROW) as server:
        server.wait_ready()
        finds: Any = partial(_finds, server)
        served = partial(_served_by_replica, server)
        server.poll(served, lambda replicas: len(replicas) == 2, 0.1)
        assert not any(map(finds, range(8)))
        for _ in range(3):
            assert all(map(finds, range(8)))
        assert min(served().values()) >= 2 * 4, "sessions are shared out"

        gone = server.replicas()[0]
        os.kill(gone, signal.SIGKILL)
        server.poll(server.replicas, lambda now: gone not in now, 0.01)
        assert 1 <= sum(map(finds, range(8))) <= 7, "who was there before is, and others are served by it, too"
        server.poll(served, lambda replicas: len(replicas) == 2, 0.1)
        for _ in range(2):
            list(map(finds, range(8)))
        assert all(map(finds, range(8)))


def _finds(server: ServeOnRay, session: int) -> bool:
    """Whether a turn of this session finds its beginning in a cache."""
    body = {"prompt": [session] * 100, "max_tokens": 2, "ignore_eos": True}
    answer = server.post(PATH, body, **{"x-session-id": f"session-{session}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def _served_by_replica(server: ServeOnRay) -> dict[float, int]:
    """How many requests those that are ready have ended, by when they started: one of them answers each time."""
    pages = [server.metrics() for _ in range(12)]
    return {page.samples["process_start_time_seconds"]: sum(page.finished.values()) for page in pages}
