"""The official SDKs' methods that make more than one request, or more of an answer than the wire has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.harness import MODEL, TIMEOUT, Server

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
FIELDS: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60}
HERE: dict[str, Any] = {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 60}


class Place(BaseModel):
    """Where it is."""

    city: Literal["Paris", "Rome"]
    large: bool


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture
def gpt(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


@anthropic.beta_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"Rain in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_runs_a_tool_and_goes_on_with_the_whole_conversation(
    claude: anthropic.Anthropic, server: Server, stream: bool
) -> None:
    one_call: Any = {"type": "any", "disable_parallel_tool_use": True}
    runner: Any = claude.beta.messages.tool_runner(
        **FIELDS, tools=[weather], tool_choice=one_call, max_iterations=2, stream=stream
    )
    first, second = [turn.get_final_message() if stream else turn for turn in runner]
    assert first.stop_reason == second.stop_reason == "tool_use"
    assert first.content[0].input["city"] in ("Paris", "Rome")
    prompts = [turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in (first, second)]
    assert prompts[1] > prompts[0]  # by the call and its result


def test_a_thread_that_the_server_should_hold_is_refused(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported") as refused:
        claude.beta.messages.create(**FIELDS, thread={"type": "continue", "previous_message_id": "msg_1"})
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_messages_are_parsed(claude: anthropic.Anthropic) -> None:
    for messages in (claude.messages, claude.beta.messages):
        parsed = messages.parse(**FIELDS, output_format=Place).parsed_output
        assert isinstance(parsed, Place)
        with messages.stream(**FIELDS, output_format=Place) as stream:
            assert isinstance(stream.get_final_message().parsed_output, Place)


def test_responses_and_their_calls_are_parsed(gpt: openai.OpenAI) -> None:
    assert isinstance(gpt.responses.parse(**HERE, text_format=Place).output_parsed, Place)
    with gpt.responses.stream(**HERE, text_format=Place) as stream:
        assert isinstance(stream.until_done().get_final_response().output_parsed, Place)
    calling: Any = gpt.chat.completions.parse(
        **FIELDS, tools=[openai.pydantic_function_tool(Place)], tool_choice="required", parallel_tool_calls=False
    )
    [call] = calling.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)


def test_raw_answers_have_their_requests_id(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    brief = {**FIELDS, "max_tokens": 2}
    raw = claude.messages.with_raw_response.create(**brief)
    assert raw.parse().id == f"msg_{raw.headers['request-id']}"
    with claude.messages.with_streaming_response.create(**brief) as streaming:
        assert streaming.parse().usage.output_tokens == 2
    answer = gpt.chat.completions.with_raw_response.create(**brief)
    assert answer.request_id == answer.headers["x-request-id"]
    assert answer.parse().id == f"chatcmpl-{answer.request_id}"


def test_what_is_not_served_is_not_found(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    for call in (
        claude.messages.batches.list,
        claude.beta.files.list,
        gpt.files.list,
        gpt.batches.list,
        gpt.vector_stores.list,
        gpt.conversations.create,
        lambda: gpt.moderations.create(input="a"),
        lambda: gpt.images.generate(prompt="a", model=MODEL),
        lambda: gpt.chat.completions.retrieve("chatcmpl-1"),
    ):
        with pytest.raises(
            (anthropic.NotFoundError, openai.NotFoundError), match="nothing at '/v1/|served for text|files_dir"
        ):
            call()
