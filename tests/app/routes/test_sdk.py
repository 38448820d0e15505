"""The `openai` package, synchronous and not: the client that everybody uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionStreamOptionsParam

from tests.support.harness import MODEL, TIMEOUT, Server

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_with_usage(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    options: ChatCompletionStreamOptionsParam = {"include_usage": True}
    *chunks, last = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32, stream=True, stream_options=options
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_stream_helper_accumulates_the_same_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    with sdk.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_completion_and_its_stream(sdk: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    whole = sdk.completions.create(**fields)
    stream = sdk.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_fields_beyond_openais_go_through_extra_body(sdk: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_tokens": 12, "top_k": 1}
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_errors_become_the_sdks_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):  # as plain JSON, though a stream was asked for
        sdk.chat.completions.create(model=MODEL, messages=[], stream=True)


def test_leaving_a_stream_early_ends_the_request(server: Server, sdk: openai.OpenAI) -> None:
    before = server.wait_idle()
    with sdk.completions.create(
        model=MODEL, prompt="On and on", stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert server.wait_until(lambda now: now.aborted > before.aborted).aborted == before.aborted + 1
    server.wait_idle()


def test_asynchronous_client_streams_and_does_not(server: Server) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=TIMEOUT) as sdk:
            fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
            whole = await sdk.chat.completions.create(**fields)
            stream = await sdk.chat.completions.create(**fields, stream=True)
            return whole.choices[0].message.content, "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream]
            )

    whole, streamed = anyio.run(ask)
    assert "Paris" in whole
    assert streamed == whole
