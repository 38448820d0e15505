"""A request that runs out of time is answered so, wherever it is, and costs nothing from then on.

The engine's side of it is in tests/engine; here is what a client sees and what the metrics say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.support.harness import Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import CONTEXT, tiny_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SLOTS = 2
PROMPT = [5, 6, 7, 8, 9]
ENDLESS = {"prompt": PROMPT, "max_tokens": CONTEXT - 10, "ignore_eos": True}
DEFAULT, LONGEST = 0.5, 1.2  # seconds


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=SLOTS, max_num_batched_tokens=16) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[Server]:
    """Its operator has set defaults and a maximum."""
    with tiny_server(default_timeout=DEFAULT, default_ttft_timeout=DEFAULT, max_timeout=LONGEST) as running:
        yield running.wait_ready()


@contextmanager
def all_seats_taken(server: Server) -> Iterator[None]:
    server.wait_idle()
    with ExitStack() as stack:
        holders = [stack.enter_context(server.connect()) for _ in range(SLOTS)]
        for holder in holders:
            holder.post(COMPLETIONS, ENDLESS | {"prompt": [3], "stream": True})
            assert holder.read_head().status_code == 200
            next(holder.chunks())
        yield
        for holder in holders:
            holder.leave_with_rst()


def check_expired(answer: httpx.Response) -> None:
    assert answer.status_code == 504, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


def timeline(server: Server, answer: httpx.Response) -> dict[str, Any]:
    found = server.client.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline")
    assert found.status_code == 200, found.text
    return found.json()


def stream_events(server: Server, body: dict[str, Any], **headers: str) -> tuple[httpx.Response, list[Any]]:
    with server.client.stream("POST", COMPLETIONS, json=body | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200
        return answer, list(sse_events(answer.iter_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"timeout": 0.2}, {}),
        ({"ttft_timeout": 0.2}, {}),
        ({}, {"x-request-timeout": "0.2"}),
        ({"timeout": 50}, {"x-request-timeout": "0.2"}),
        ({"timeout": 0.2}, {"x-request-timeout": "50"}),
        ({"timeout": 50, "ttft_timeout": 0.2}, {}),
        ({"timeout": 1e-6}, {}),
    ],
    ids=str,
)
def test_a_request_that_expires_in_the_queue_is_never_prefilled(
    server: Server, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    with all_seats_taken(server):
        before = server.metrics()
        answer = server.post(COMPLETIONS, ENDLESS | fields, **headers)
        check_expired(answer)
        after = server.wait_until(lambda now: now.waiting == 0)
        assert after.computed_tokens == before.computed_tokens
        assert after.finished == before.finished | {"timeout": before.finished["timeout"] + 1}
        assert after.running == SLOTS
    story = timeline(server, answer)
    assert story["finish_reason"] == "timeout"
    assert story["events"] == []
    assert [segment["name"] for segment in story["segments"]][:3] == ["receive", "tokenize", "queue"]


@pytest.mark.slow
def test_a_stream_that_expires_in_the_queue_ends_with_an_error_frame_and_its_usage(server: Server) -> None:
    with all_seats_taken(server):
        before = server.metrics()
        _, events = stream_events(server, ENDLESS | {"timeout": 0.5})
        assert server.metrics().computed_tokens == before.computed_tokens
    frame, done = events
    assert done == "[DONE]"
    assert frame["error"]["code"] == "deadline_exceeded"
    assert frame["usage"]["prompt_tokens"] == len(PROMPT)
    assert frame["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_expires_while_it_decodes_says_what_it_has_used(server: Server, n: int) -> None:
    for timeout in (0.6, 3.0, 6.0):  # a busy machine may not have begun
        before = server.wait_idle()
        answer, events = stream_events(server, ENDLESS | {"timeout": timeout, "n": n})
        *chunks, frame, done = events
        if chunks:
            break
    assert chunks, "it had begun"
    assert done == "[DONE]"
    assert not any("error" in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert frame["error"]["code"] == "deadline_exceeded"
    after = server.wait_idle()
    usage, story = frame["usage"], timeline(server, answer)
    assert 0 < usage["completion_tokens"] == story["output_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == story["prompt_tokens"] == len(PROMPT)
    assert after.generation_tokens - before.generation_tokens == story["output_tokens"]
    assert after.finished == before.finished | {"timeout": before.finished["timeout"] + 1}


def test_an_answer_that_expires_before_it_is_whole_is_a_504(server: Server) -> None:
    before = server.wait_idle()
    check_expired(server.post(COMPLETIONS, ENDLESS | {"timeout": 0.4}))
    message = [{"role": "user", "content": "Hi"}]
    body = {"messages": message, "max_tokens": CONTEXT // 2, "ignore_eos": True, "timeout": 0.4}
    check_expired(server.post(CHAT, body))
    after = server.wait_idle()
    assert after.finished == before.finished | {"timeout": before.finished["timeout"] + 2}


def test_a_prefill_that_cannot_make_it_is_not_finished(server: Server) -> None:
    before = server.wait_idle()
    prompt = [11 + number % 1000 for number in range(CONTEXT - 100)]
    check_expired(server.post(COMPLETIONS, ENDLESS | {"prompt": prompt, "max_tokens": 1, "ttft_timeout": 0.1}))
    assert server.wait_idle().computed_tokens - before.computed_tokens < len(prompt)


def test_a_ttft_timeout_that_was_kept_ends_nothing_later(server: Server) -> None:
    ttft_timeout = 2.0
    with server.connect() as client:
        client.post(COMPLETIONS, ENDLESS | {"ttft_timeout": ttft_timeout, "stream": True})
        assert client.read_head().status_code == 200
        events = sse_events(client.chunks())
        assert "choices" in next(events)
        until = time.monotonic() + ttft_timeout
        while time.monotonic() < until:
            assert "choices" in next(events)
        client.leave_with_rst()
    server.wait_idle()


def test_a_request_that_expires_changes_nobody_elses_text(server: Server) -> None:
    body: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 400, "ignore_eos": True, "seed": 7}
    alone = server.complete(**body | {"temperature": 1})
    with server.connect() as client:
        client.post(COMPLETIONS, body)
        check_expired(server.post(COMPLETIONS, ENDLESS | {"prompt": [40, 41, 42, 43], "timeout": 0.3}))
        assert client.read_head().status_code == 200
        assert json.loads(client.read_body())["choices"] == alone["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["timeout", "ttft_timeout"])
@pytest.mark.parametrize("value", ["0", "-1", '"5"', "true", "[1]", "{}", "-1e-300"])
def test_a_field_that_is_no_time_is_refused_by_name(server: Server, path: str, field: str, value: str) -> None:
    good = '"prompt": "Hi"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "Hi"}]'
    answer = server.client.post(path, content=f'{{{good}, "max_tokens": 1, "{field}": {value}}}')
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "soon", "nan", "inf", "-inf", "1e999", "0x10", "5s", "1,5", "9" * 1000]
)
def test_a_header_that_is_no_time_is_refused_by_name(server: Server, value: str) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}, **{"x-request-timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
    assert len(answer.text) < 500


def test_the_sdk_does_not_try_again_what_has_run_out_of_time(server: Server) -> None:
    before = server.wait_idle()
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=5) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=CONTEXT - 10, extra_body={"timeout": 0.3, "ignore_eos": True}
            )
        assert failed.value.status_code == 504
        assert failed.value.code == "deadline_exceeded"
    after = server.wait_idle()
    assert after.http_requests(COMPLETIONS, "5xx") == before.http_requests(COMPLETIONS, "5xx") + 1
    assert after.finished["timeout"] == before.finished["timeout"] + 1


def test_the_operators_default_holds_for_whoever_asks_for_nothing(impatient_server: Server) -> None:
    taken: list[float] = []
    while len(taken) < 5 and min(taken, default=LONGEST) >= LONGEST:  # a busy machine may be late
        answer = impatient_server.post(COMPLETIONS, ENDLESS)
        check_expired(answer)
        taken.append(timeline(impatient_server, answer)["seconds"])
    assert DEFAULT <= min(taken) < LONGEST


@pytest.mark.parametrize("asked", [LONGEST, 1000, 1e300])
def test_a_request_may_ask_for_more_than_the_default_up_to_the_maximum(impatient_server: Server, asked: float) -> None:
    answer = impatient_server.post(COMPLETIONS, ENDLESS | {"timeout": asked, "ttft_timeout": asked})
    check_expired(answer)
    assert timeline(impatient_server, answer)["seconds"] >= LONGEST


def test_a_request_within_its_time_does_not_notice(impatient_server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
    answers = (impatient_server.post(COMPLETIONS, body) for _ in range(20))  # a busy machine may be late
    answer = next(answer for answer in answers if answer.status_code == 200)
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert impatient_server.wait_idle().finished["length"] == 1
