"""The cheap clients count what a real server sent, and say what has failed."""

from __future__ import annotations

import anyio
import pytest

from loadtest.sse_clients import Work, load
from tests.support.tiny_model import NAME, tiny_server


def measure(url: str, num_streams: int, work: Work) -> dict:
    async def run() -> dict:
        return await load(url, num_streams, work)

    return anyio.run(run)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_every_request_is_answered_and_its_tokens_are_counted(engine: str) -> None:
    with tiny_server(engine=engine) as server:
        server.wait_ready()
        before = server.metrics()
        work = Work(num_requests=24, prompt_words=8, max_tokens=10, model=NAME, seed=1)
        figures = measure(server.base_url, 8, work)
        after = server.wait_idle()
        assert figures["failed"] == {}
        assert figures["requests"] == 24
        assert figures["tokens"] == 240 == after.generation_tokens - before.generation_tokens
        assert len(work.figures.ttft) == 24
        assert figures["gap_ms"]["p50"] <= figures["gap_ms"]["p99"] <= figures["gap_ms"]["max"]
        refused = measure(server.base_url, 2, Work(4, 8, 10, "another-model", seed=1))
        assert refused["failed"] == {"HTTP/1.1 404 ": 2}
        assert refused["tokens"] == 0
