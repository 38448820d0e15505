"""Reasoning between tags, parted from the answer on a real server.

The model is random, so the conversation brings the tags: an answer that the client has begun is continued, as it is by
templates that open the reasoning in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest

from tests.support.harness import TIMEOUT, Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import NAME, tiny_server

BEGUN = {"add_generation_prompt": False, "continue_final_message": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def thinking_server() -> Iterator[Server]:
    with tiny_server(reasoning_parser="think") as running:
        yield running.wait_ready()


@pytest.fixture
def sdk(thinking_server: Server) -> Iterator[openai.OpenAI]:
    url = f"{thinking_server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def fields(begun: str, **extra: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": begun}]
    return {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8, "extra_body": BEGUN | extra}


@pytest.mark.slow
def test_reasoning_that_the_prompt_has_opened_and_nothing_has_closed(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**fields("<think>"))
    [choice] = whole.choices
    assert choice.message.content is None
    assert choice.message.reasoning
    assert choice.message.reasoning_content == choice.message.reasoning
    assert choice.finish_reason == "length"
    assert whole.usage
    assert whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens == 8

    *chunks, last = sdk.chat.completions.create(
        **fields("<think>"), stream=True, stream_options={"include_usage": True}
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == choice.message.reasoning
    assert not any(delta.content for delta in deltas)
    assert last.usage == whole.usage


@pytest.mark.slow
def test_reasoning_may_be_left_out_of_the_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**fields("<think>", include_reasoning=False))
    assert not whole.choices[0].message.content
    assert whole.choices[0].message.reasoning is None
    assert whole.usage
    assert whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8


def test_what_comes_after_the_closing_tag_is_the_answer(sdk: openai.OpenAI) -> None:
    asked = fields("<think>\nI greet.\n</think>\n\nHello", echo=True)
    whole = sdk.chat.completions.create(**asked).choices[0].message
    assert whole.reasoning == "I greet."
    assert (whole.content or "").startswith("Hello")
    with sdk.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed: Any = stream.current_completion_snapshot.choices[0].message
    assert (streamed.reasoning, streamed.content) == (whole.reasoning, whole.content)


def test_an_answer_without_tags_is_an_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**fields("Hello"))
    assert whole.choices[0].message.content
    assert whole.choices[0].message.reasoning is None
    assert whole.usage
    assert whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_is_a_thinking_block_of_a_message(thinking_server: Server) -> None:
    body = {
        "messages": fields("<think>")["messages"],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "thinking": {"type": "adaptive"},
    }
    message = thinking_server.post("/v1/messages", body).json()
    [block] = message["content"]
    assert block["type"] == "thinking"
    assert block["signature"]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 8}

    events = list(sse_events([thinking_server.post("/v1/messages", body | {"stream": True}).content]))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == block["thinking"] != ""
    assert deltas[-1] == {"type": "signature_delta", "signature": block["signature"]}

    hidden = thinking_server.post("/v1/messages", body | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert hidden.json()["content"] == [block | {"thinking": ""}]


# --- budgets

NUM_CLOSING = 3  # tokens of </think> in this vocabulary; see the first test


def test_reasoning_is_closed_at_its_budget(sdk: openai.OpenAI, thinking_server: Server) -> None:
    closing = thinking_server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    assert len(closing) == NUM_CLOSING
    free = sdk.chat.completions.create(**fields("<think>") | {"max_tokens": 24})
    for budget in (0, 5):
        asked = fields("<think>", thinking_token_budget=budget, return_token_ids=True) | {"max_tokens": 24}
        whole = sdk.chat.completions.create(**asked, logprobs=True, n=2)
        assert whole.usage
        assert whole.usage.completion_tokens_details
        for choice in whole.choices:
            token_ids = choice.token_ids
            assert token_ids[budget : budget + NUM_CLOSING] == closing
            assert choice.message.content
            assert bool(choice.message.reasoning) == (budget > 0)
            assert choice.logprobs
            assert len(choice.logprobs.content or ()) == 24
        assert free.choices[0].message.reasoning.startswith(whole.choices[0].message.reasoning or "")
        one = sdk.chat.completions.create(**asked)
        assert one.usage
        assert one.usage.completion_tokens_details
        assert one.usage.completion_tokens_details.reasoning_tokens == budget + NUM_CLOSING
        with sdk.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed: Any = stream.current_completion_snapshot.choices[0].message
        assert getattr(streamed, "reasoning", None) == one.choices[0].message.reasoning
        assert streamed.content == one.choices[0].message.content
    unbounded = sdk.chat.completions.create(**fields("<think>", thinking_token_budget=-1) | {"max_tokens": 24})
    assert unbounded.choices[0].message.reasoning == free.choices[0].message.reasoning


def test_what_is_demanded_of_the_answer_comes_after_the_budget(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "small", "schema": schema, "strict": True}}
    asked = fields("<think>", thinking_token_budget=6) | {"max_tokens": 60}
    message = sdk.chat.completions.create(**asked, response_format=form).choices[0].message
    assert message.reasoning
    assert orjson.loads(message.content or "")["a"] in (1, 2)
    tool: Any = {"type": "function", "function": {"name": "count", "parameters": schema}}
    called = sdk.chat.completions.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    calls = called.choices[0].message.tool_calls
    assert calls
    [call] = calls
    assert call.type == "function"
    assert orjson.loads(call.function.arguments)["a"] in (1, 2)
    assert called.choices[0].message.reasoning == message.reasoning


def test_a_tag_of_stop_tokens_is_written_before_min_tokens(sdk: openai.OpenAI, thinking_server: Server) -> None:
    closing = thinking_server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    limits = {"thinking_token_budget": 5, "stop_token_ids": [closing[-1]], "min_tokens": 20, "return_token_ids": True}
    [choice] = sdk.chat.completions.create(**fields("<think>", **limits) | {"max_tokens": 24}).choices
    assert choice.token_ids[5:8] == closing
    assert choice.message.content
    assert 20 <= len(choice.token_ids) <= 24


def test_a_budget_of_messages_is_kept(thinking_server: Server) -> None:
    body = {
        "messages": fields("<think>")["messages"],
        "max_tokens": 1050,
        "temperature": 0,
        "ignore_eos": True,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    message = thinking_server.post("/v1/messages", body).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 1024 + NUM_CLOSING}


def test_a_model_that_does_not_reason_has_no_use_for_a_budget(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 6, "temperature": 0}
    plain = server.post("/v1/chat/completions", asked).json()
    budgeted = server.post("/v1/chat/completions", asked | {"thinking_token_budget": 2}).json()
    assert budgeted["choices"] == plain["choices"]
    bad = server.post("/v1/chat/completions", asked | {"thinking_token_budget": -2})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "thinking_token_budget")
