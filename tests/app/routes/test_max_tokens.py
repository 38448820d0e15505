"""A limit beyond the context is cut to what fits, on every API: clients send what their model table says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.harness import Server
from tests.support.streams import stream
from tests.support.tiny_model import NAME, tiny_server

CONTEXT = 96
QUESTION: Any = [{"role": "user", "content": "Hi"}]
LIMITS = [CONTEXT, 128_000, 2**31 - 1, 2**31, 10**12, 2**63 - 1, 2**64 - 1, -1]
ANYTHING = {"ignore_eos": True, "temperature": 0}
TURNS = [{"role": role, "content": "word " * 8} for role in ("user", "assistant", "user", "assistant", "user")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_model_len=CONTEXT) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_beyond_the_context_is_cut_to_what_fits(server: Server, limit: int) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": [[5, 6, 7]], "max_tokens": limit}),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": limit}),
        ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": limit, "max_tokens": 5}),
    ):
        answer = server.post(path, fields | ANYTHING)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["total_tokens"] == CONTEXT
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_choices_of_prompts_of_different_lengths_fill_the_context_each(server: Server) -> None:
    streamed = stream(server, "/v1/completions", {"prompt": [[5], [5] * 90], "max_tokens": 10**6, **ANYTHING, "n": 2})
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 2 * (CONTEXT - 1) + 2 * (CONTEXT - 90)
    assert {choice.finish_reason for choice in streamed.choices} == {"length"}


@pytest.mark.parametrize("limit", LIMITS)
def test_responses_are_cut_and_incomplete(server: Server, limit: int) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.responses.create(model=NAME, input="Hi", max_output_tokens=limit, extra_body={"ignore_eos": True})
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT


@pytest.mark.parametrize("limit", LIMITS)
def test_messages_tell_that_the_context_was_the_limit(server: Server, sdk: anthropic.Anthropic, limit: int) -> None:
    answer = sdk.messages.create(model=NAME, messages=QUESTION, max_tokens=limit, extra_body=ANYTHING, timeout=60)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) + answer.usage.output_tokens == 96


def test_messages_tell_max_tokens_if_they_end_the_answer(server: Server, sdk: anthropic.Anthropic) -> None:
    room = CONTEXT - sdk.messages.count_tokens(model=NAME, messages=QUESTION).input_tokens
    for limit, reason in ((3, "max_tokens"), (room, "max_tokens"), (room + 1, "model_context_window_exceeded")):
        with sdk.messages.stream(model=NAME, messages=QUESTION, max_tokens=limit, extra_body=ANYTHING) as events:
            message = events.get_final_message()
        assert (message.stop_reason, message.usage.output_tokens) == (reason, min(limit, room))


def test_a_prompt_that_fills_the_context_is_refused_whatever_the_limit(server: Server) -> None:
    for limit in (1, 10**6, -1):
        error = server.post("/v1/completions", {"prompt": [5] * CONTEXT, "max_tokens": limit}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "a"}),
        ("/v1/chat/completions", "max_tokens", {"messages": QUESTION}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": QUESTION}),
        ("/v1/responses", "max_output_tokens", {"input": "a"}),
        ("/v1/messages", "max_tokens", {"messages": QUESTION}),
    ],
)
def test_all_other_limits_are_refused_in_the_same_words(
    server: Server, path: str, name: str, fields: dict[str, Any]
) -> None:
    for wrong in (0, -2, -(10**12)):
        answer = server.post(path, fields | {name: wrong})
        assert answer.status_code == 400, answer.text
        told = f"{name} must be at least 1, or -1 for as many as fit, got {wrong}."
        assert answer.json()["error"]["message"] == told


def test_a_minimum_beyond_the_context_ends_with_it(server: Server) -> None:
    body = {"prompt": [[5, 6, 7]], "max_tokens": 200_000, "min_tokens": 100_000, "logit_bias": {"2": 100}}
    answer = server.post("/v1/completions", body).json()
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (CONTEXT, "length")


def test_a_prompt_that_is_cut_leaves_at_most_half_of_the_context_to_the_answer(server: Server) -> None:
    for limit, kept in ((20, CONTEXT - 20), (90, CONTEXT // 2), (128_000, CONTEXT // 2), (-1, CONTEXT - 1)):
        body = {"prompt": [5] * 200, "truncate_prompt_tokens": -1, "max_tokens": limit, **ANYTHING}
        usage = server.post("/v1/completions", body).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (kept, min(limit % 2**31, CONTEXT - kept))


def test_a_conversation_that_is_cut_keeps_what_fits_beside_half_of_the_context(server: Server) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        answer = server.post(
            "/v1/responses", {"truncation": "auto", "max_output_tokens": 128_000, **fields, **ANYTHING}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    whole = server.post("/v1/responses/input_tokens", {"input": TURNS}).json()["input_tokens"]
    assert whole > CONTEXT // 2
    usage = ask(input=TURNS)
    assert usage["input_tokens"] <= CONTEXT // 2
    assert usage["total_tokens"] == CONTEXT
    # A turn that fits alone is answered, however little room it leaves.
    usage = ask(input="word " * 55)
    assert usage["input_tokens"] > CONTEXT // 2
    assert usage["total_tokens"] == CONTEXT
