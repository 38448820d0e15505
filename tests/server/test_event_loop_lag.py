"""No request keeps the event loop from the others, however much work it is: neither its checks, nor its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import MAX_HOLD, Server, longest_hold
from tests.server.loop_cases import Case, cases
from tests.server.tiny_model import tiny_server

NAMES = [case.name for case in cases()]


@pytest.fixture(scope="module", params=["uvloop", pytest.param("trio", marks=pytest.mark.storm)])
def busy_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that runs all choices of the largest request at once."""
    settings = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "kv_cache_memory": "64MiB", "log_requests": False}
    with tiny_server(request.param, **settings) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def all_cases() -> dict[str, Case]:
    """Made for this file alone: they are 200 MB."""
    return {case.name: case for case in cases()}


@pytest.mark.parametrize("name", NAMES)
def test_no_request_holds_the_event_loop(busy_server: Server, all_cases: dict[str, Case], name: str) -> None:
    case, before = all_cases[name], len(busy_server.log)
    answer = busy_server.client.post(case.path, content=case.content)
    assert answer.status_code == case.status, answer.text[:500]
    busy_server.wait_idle()
    assert longest_hold(busy_server.log[before:]) <= MAX_HOLD, busy_server.log[before:]


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
