"""Many clients at once, each of whom might as well be alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.harness import TIMEOUT, Server
from tests.support.raw_client import sse_events

THINGS = """
anchor bridge candle desert engine forest garden harbor island jacket kettle ladder magnet needle orchard pencil
quarry ribbon saddle temple umbrella valley window yard zebra apple basket carpet dragon eagle feather glacier
hammer iceberg jungle kitchen lantern meadow nest ocean palace queen river shadow tunnel uncle village whale
actor bottle camera doctor elephant flower guitar horse insect judge king lemon mirror notebook oven piano
"""


def test_64_streams_at_once_each_say_what_they_say_alone(server: Server) -> None:
    """Float32 and greedy. Lengths differ, so that the batch is another one at every step."""
    requests: list[dict[str, Any]] = [
        {"prompt": f"The {thing} is", "max_tokens": 3 + number % 4, "temperature": 0, "ignore_eos": True}
        for number, thing in enumerate(THINGS.split())
    ]
    assert len(requests) == 64
    before = server.wait_idle()

    together = threading.Barrier(len(requests))

    def read(request: dict[str, object]) -> str:
        with httpx.Client(base_url=server.base_url, timeout=TIMEOUT, trust_env=False) as client:
            together.wait(TIMEOUT)
            with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
                *chunks, done = sse_events(answer.iter_bytes())
        assert done == "[DONE]"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(len(requests)) as pool:
        streamed = list(pool.map(read, requests))
    after = server.wait_idle()
    assert after.finished["length"] == before.finished["length"] + 64

    steps = [now.samples["vllm:iteration_tokens_total_count"] for now in (before, after)]
    tokens = after.generation_tokens - before.generation_tokens
    assert steps[1] - steps[0] < tokens / 4, "they did not run together"

    alone = [server.complete(**request)["choices"][0]["text"] for request in requests]
    assert streamed == alone
