"""What does not fit into the queue is refused at once, untokenized and with a time to come back; the rest finishes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.harness import Server
from tests.support.raw_client import RawClient
from tests.support.tiny_model import CONTEXT, tiny_server

COMPLETIONS = "/v1/completions"
SLOTS, PLACES, TOKENS = 2, 6, 1000
FOR_EVER = {"prompt": "Hold", "max_tokens": CONTEXT - 10, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Short", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=SLOTS, max_queued_requests=PLACES, max_queued_tokens=TOKENS) as running:
        yield running.wait_ready()


@contextmanager
def all_seats_taken(server: Server) -> Iterator[None]:
    """Whoever comes now has to wait until this block is left. The queue itself is empty."""
    server.wait_idle()
    with ExitStack() as stack:
        holders = [stack.enter_context(server.connect()) for _ in range(SLOTS)]
        for holder in holders:
            holder.post(COMPLETIONS, FOR_EVER)
            assert holder.read_head().status_code == 200
            next(holder.chunks())  # its first token: it has left the queue
        yield
        for holder in holders:
            holder.leave_with_rst()


@contextmanager
def waiting(server: Server, *bodies: dict[str, Any]) -> Iterator[list[RawClient]]:
    """Clients whose requests wait in the queue."""
    before = server.metrics().waiting
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.post(COMPLETIONS, body)
        server.wait_until(lambda now: now.waiting == before + sum(map(_choices, bodies)))
        yield clients


def _choices(body: dict[str, Any]) -> int:
    prompts = body["prompt"]
    return body.get("n", 1) * (len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1)


def check_finished(clients: list[RawClient]) -> None:
    for client in clients:
        assert client.read_head().status_code == 200
        assert json.loads(client.read_body())["choices"][0]["finish_reason"] == "length"


def rejections(server: Server, reason: str) -> float:
    return server.metrics().samples[f"vllm:admission_rejections_total{{reason={reason}}}"]


def check_refused(server: Server, body: dict[str, Any], reason: str) -> None:
    before, counted = server.metrics(), rejections(server, reason)
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert rejections(server, reason) == counted + 1
    after = server.metrics()
    assert after.waiting == before.waiting
    assert after.finished == before.finished, "a refusal is no finished request"
    assert after.samples["vllm:prompt_tokens_total"] == before.samples["vllm:prompt_tokens_total"]


def check_refused_in_dialects(server: Server) -> None:
    answer = server.post("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert int(answer.headers["retry-after"]) >= 1
    answer = server.post("/v1/responses", {"input": "Hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


@pytest.mark.slow
def test_a_full_queue_refuses_the_surplus_and_finishes_those_it_has_accepted(server: Server) -> None:
    with ExitStack() as stack:
        with all_seats_taken(server):
            assert server.client.get("/readyz").status_code == 200, "busy is not full"
            clients = stack.enter_context(waiting(server, *[SHORT] * PLACES))
            answer = server.client.get("/readyz")
            assert answer.status_code == 503, "the next one would be refused"
            assert answer.json()["queue_full"]
            assert server.client.get("/health").status_code == 503
            assert server.client.get("/livez").status_code == 200, "and yet nothing is wrong"
            for _ in range(3):
                check_refused(server, SHORT, "max_queued_requests")
            check_refused(server, SHORT | {"stream": True}, "max_queued_requests")
            check_refused_in_dialects(server)
        check_finished(clients)
    assert server.client.get("/readyz").status_code == 200
    assert server.complete("Short", max_tokens=1)["choices"]


@pytest.mark.slow
def test_a_place_is_taken_by_each_choice_of_each_prompt(server: Server) -> None:
    with ExitStack() as stack:
        with all_seats_taken(server):
            clients = stack.enter_context(waiting(server, SHORT | {"n": 2, "prompt": ["a", "b"]}))
            check_refused(server, SHORT | {"n": PLACES - 3}, "max_queued_requests")
            check_refused(server, SHORT | {"prompt": ["a"] * (PLACES - 3)}, "max_queued_requests")
            clients += stack.enter_context(waiting(server, SHORT | {"n": PLACES - 4}))
            check_refused(server, SHORT, "max_queued_requests")
        check_finished(clients)


def test_tokens_that_wait_are_limited_too_each_prompts_once(server: Server) -> None:
    long = SHORT | {"prompt": list(range(100, 100 + TOKENS * 6 // 10)), "n": 2}
    with ExitStack() as stack:
        with all_seats_taken(server):
            clients = stack.enter_context(waiting(server, long))
            check_refused(server, SHORT | {"prompt": "word " * TOKENS}, "max_queued_tokens")
            clients += stack.enter_context(waiting(server, SHORT))
        check_finished(clients)


def test_a_prompt_above_the_limit_gets_its_turn_when_nobody_waits(server: Server) -> None:
    body = SHORT | {"prompt": list(range(100, 100 + TOKENS + 100))}
    assert server.post(COMPLETIONS, body).status_code == 200
    with all_seats_taken(server), waiting(server, SHORT):
        check_refused(server, body, "max_queued_tokens")


def test_what_is_refused_is_refused_before_it_is_tokenized(server: Server) -> None:
    """A prompt that is too long for the model is a 400 for whoever tokenizes it."""
    too_long = SHORT | {"prompt": "a b " * CONTEXT}
    assert server.post(COMPLETIONS, too_long).status_code == 400
    with all_seats_taken(server), waiting(server, *[SHORT] * PLACES):
        check_refused(server, too_long, "max_queued_requests")


def test_a_request_that_could_never_be_accepted_is_told_so(server: Server) -> None:
    """A 429 would have the client come back for ever."""
    before = server.metrics()
    for body in (SHORT | {"n": PLACES + 1}, SHORT | {"prompt": ["a", "b"], "n": PLACES - 1}):
        answer = server.post(COMPLETIONS, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert f"at most {PLACES}" in answer.json()["error"]["message"]
        with all_seats_taken(server), waiting(server, *[SHORT] * PLACES):
            assert server.post(COMPLETIONS, body).status_code == 400, "full or not"
    assert (
        rejections(server, "max_queued_requests")
        == before.samples["vllm:admission_rejections_total{reason=max_queued_requests}"]
    )


def test_a_place_comes_back_when_its_client_leaves(server: Server) -> None:
    with all_seats_taken(server), waiting(server, *[SHORT] * PLACES) as clients:
        check_refused(server, SHORT, "max_queued_requests")
        clients[0].leave_with_rst()
        server.wait_until(lambda now: now.waiting == PLACES - 1)
        with waiting(server, SHORT):
            check_refused(server, SHORT, "max_queued_requests")


def test_of_a_burst_everybody_is_answered_and_the_books_know_whom(server: Server) -> None:
    before = server.wait_idle()
    refused_before = rejections(server, "max_queued_requests")
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(60)]
        for client in clients:
            client.post(COMPLETIONS, SHORT | {"max_tokens": 50})
        answers = [(client.read_head().status_code, json.loads(client.read_body())) for client in clients]
    statuses = Counter(status for status, _ in answers)
    assert statuses.keys() == {200, 429}
    after = server.wait_idle()
    assert after.finished["length"] - before.finished["length"] == statuses[200]
    assert rejections(server, "max_queued_requests") - refused_before == statuses[429]
    assert sum(after.finished.values()) - sum(before.finished.values()) == statuses[200]
    for status, body in answers:
        assert ("error" in body) == (status == 429)
