"""No request keeps the event loop from the others, however much work it is: neither its checks, nor its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import orjson
import pytest

from tests.support.harness import MAX_HOLD, Metrics, Server, longest_hold
from tests.support.loop_cases import Case, cases
from tests.support.tiny_model import tiny_server

NAMES = [case.name for case in cases()]


@pytest.fixture(scope="module", params=["uvloop", pytest.param("trio", marks=pytest.mark.storm)])
def busy_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that runs all choices of the largest request at once."""
    settings = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "kv_cache_memory": "64MiB", "log_requests": False}
    settings["max_body_bytes"] = "16MiB"
    with tiny_server(request.param, **settings) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def all_cases() -> dict[str, Case]:
    """Made for this file alone: they are 200 MB."""
    return {case.name: case for case in cases()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_request_holds_the_event_loop(busy_server: Server, all_cases: dict[str, Case], name: str) -> None:
    case, before = all_cases[name], len(busy_server.log)
    answer = busy_server.client.post(case.path, content=case.content)
    assert answer.status_code == case.status, answer.text[:500]
    busy_server.wait_idle()
    assert longest_hold(busy_server.log[before:]) <= MAX_HOLD, busy_server.log[before:]


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [b"[]", b'{"a":1}'], ids=["arrays", "objects"])
def test_no_thread_holds_the_lock_for_a_body_of_small_values(busy_server: Server, unknown: bytes) -> None:
    """Decoding is one call on another thread, so no request holds the loop, but the loop lags."""
    content = b'{"prompt": "a", "max_tokens": 1, "unknown": [' + b",".join(
        [unknown] * (15 * 2**20 // (len(unknown) + 1))
    )
    content += b"]}"
    started = time.perf_counter()
    orjson.loads(content)
    decoding = time.perf_counter() - started
    before = busy_server.metrics()
    for _ in range(3):
        assert busy_server.client.post("/v1/completions", content=content).status_code == 413
    assert longest_lag(before, busy_server.metrics()) <= decoding / 2


def longest_lag(before: Metrics, after: Metrics) -> float:
    """The bound, in seconds, of the longest lag that has come to the histogram."""
    bounds: list[float] = []
    for name, count in after.samples.items():
        if (bound := re.fullmatch(r"headrace:event_loop_lag_seconds_bucket{le=(.*)}", name)) is not None:
            bounds += [float(bound[1])] * int(count - before.samples[name])
    total = "headrace:event_loop_lag_seconds_count"
    longest = int(after.samples[total] - before.samples[total])
    return min((bound for bound in set(bounds) if bounds.count(bound) == longest), default=0.0)


@pytest.mark.slow
def test_the_input_of_a_stored_response_is_listed_and_continued_without_a_hold(busy_server: Server) -> None:
    before = len(busy_server.log)
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"turn {number}"} for number in range(2001)]
    body = {"input": turns, "truncation": "auto", "max_output_tokens": 1, "store": True}
    response = busy_server.post("/v1/responses", body).json()
    page = busy_server.client.get(f"/v1/responses/{response['id']}/input_items?limit=100")
    assert len(page.json()["data"]) == 100
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    for more in ({"input": "go on", "previous_response_id": response["id"]}, {"input": [reference, turns[0]]}):
        answer = busy_server.post("/v1/responses", {**body, **more})
        assert answer.status_code == 200, answer.text
    assert longest_hold(busy_server.log[before:]) <= MAX_HOLD, busy_server.log[before:]


def test_the_lag_of_the_event_loop_is_a_histogram_that_grows_by_itself(busy_server: Server) -> None:
    name = "headrace:event_loop_lag_seconds_count"
    before = busy_server.metrics().samples[name]
    busy_server.wait_until(lambda now: now.samples[name] >= before + 10)


def test_holds_are_counted_by_what_requests_do(busy_server: Server) -> None:
    name = "headrace:event_loop_hold_seconds_count"
    before = busy_server.metrics().samples[name]
    busy_server.complete("a", max_tokens=1)
    busy_server.wait_until(lambda now: now.samples[name] > before)
