"""The `openai` package against /v1/responses, synchronous and not; every body and event is strictly its type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support.harness import MODEL, TIMEOUT, Server
from tests.support.raw_client import sse_events

QUESTION = "What is the capital of France?"
GREEDY: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_response_and_its_stream_helper(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(**GREEDY, max_output_tokens=32)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    with sdk.responses.stream(**GREEDY, max_output_tokens=32) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_async_stream(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        stream = await sdk.responses.create(**GREEDY, max_output_tokens=32, stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert "Paris" in events[-1].response.output_text


def test_body_is_strictly_a_response_and_tells_its_request(server: Server) -> None:
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 3, "top_p": 0.5}
    body = server.post("/v1/responses", {**GREEDY, **fields, "prompt_cache_key": "k"}).content
    response = Response.model_validate_json(body, strict=True)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert orjson.loads(body).items() >= {**fields, "prompt_cache_key": "k", "store": True, "error": None}.items()


def test_events_come_in_order_and_are_strictly_their_types(server: Server) -> None:
    body = {**GREEDY, "max_output_tokens": 32, "stream": True}
    events = list(sse_events([server.post("/v1/responses", body).content]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_json(orjson.dumps(event), strict=True)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}


def test_items_and_instructions_are_the_conversation_that_chat_has(server: Server) -> None:
    messages = [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A pirate."},
        {"role": "user", "content": "And I?"},
    ]
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Who are you?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A pirate."}], "id": "m"},
        {"type": "message", "role": "user", "content": "And I?"},
    ]
    for spelled in (
        {"instructions": messages[0]["content"], "input": items},
        {"input": [{"role": "developer", "content": messages[0]["content"]}, *items]},
    ):
        body = {**GREEDY, **spelled, "max_output_tokens": 12}
        response = server.post("/v1/responses", body).json()
        assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        count = server.post("/v1/responses/input_tokens", body).json()
        assert count == {"object": "response.input_tokens", "input_tokens": chat["usage"]["prompt_tokens"]}
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_logprobs_come_with_their_text(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(
        **GREEDY, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2
    )
    [item] = response.output
    assert item.type == "message"
    [content] = item.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert len(content.logprobs) == 4
    assert "".join(entry.token for entry in content.logprobs) == content.text
    assert all(len(entry.top_logprobs) == 2 for entry in content.logprobs)


def test_what_coding_agents_send_is_taken(sdk: openai.OpenAI) -> None:
    """Codex's request: nothing is kept, the whole history is sent, reasoning is asked for in every form."""
    history: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command":["ls"]}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
    ]
    tools: list[Any] = [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "web_search", "external_web_access": False},
    ]
    stream = sdk.responses.create(
        model=MODEL,
        instructions="You are an agent.",
        input=history,
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="session",
        store=False,
        stream=True,
        extra_body={"client_metadata": {"a": "b"}, "max_output_tokens": 8, "temperature": 0},
    )
    *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text


# --- functions and formats

CITIES = ["Paris", "Rome"]
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALLING: dict[str, Any] = {**GREEDY, "tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 100}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=str,
)
def test_a_function_that_has_to_be_called_is_called(sdk: openai.OpenAI, choice: Any) -> None:
    [item] = sdk.responses.create(**CALLING, tool_choice=choice).output
    assert item.type == "function_call"
    assert item.name == "get_weather"
    assert orjson.loads(item.arguments)["city"] in CITIES
    assert item.status == "completed"


def test_a_streamed_call_and_its_result(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(**CALLING, tool_choice="required") as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    [call] = final.output
    assert call.type == "function_call"
    assert call.arguments == arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    kept = sdk.responses.create(**fields, input=[result], previous_response_id=final.id)
    history: list[Any] = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
    sent = sdk.responses.create(**fields, input=history)
    assert kept.output_text == sent.output_text
    assert kept.usage is not None
    assert sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens


def test_events_of_a_call_are_in_order_and_strictly_their_types(server: Server) -> None:
    answer = server.post("/v1/responses", {**CALLING, "tool_choice": "required", "stream": True})
    events = list(sse_events([answer.content]))
    for event in events:
        EVENT.validate_json(orjson.dumps(event), strict=True)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert set(names[3:-3]) == {"function_call_arguments.delta"}
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]


class City(BaseModel):
    """What is asked for."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


def test_a_format_is_kept_and_parsed(sdk: openai.OpenAI) -> None:
    response = sdk.responses.parse(**GREEDY, max_output_tokens=60, text_format=City)
    assert isinstance(response.output_parsed, City)
    free = sdk.responses.create(**GREEDY, max_output_tokens=30, text={"format": {"type": "json_object"}})
    assert free.status == "incomplete" or isinstance(orjson.loads(free.output_text), dict)


# --- responses that are kept


def test_a_response_is_continued_retrieved_listed_and_deleted(sdk: openai.OpenAI, server: Server) -> None:
    first = sdk.responses.create(**GREEDY, max_output_tokens=16)
    assert sdk.responses.retrieve(first.id) == first
    second = sdk.responses.create(
        model=MODEL, input="Say it again.", temperature=0, max_output_tokens=8, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Say it again."},
    ]
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert second.output_text == chat["choices"][0]["message"]["content"]

    listed = sdk.responses.input_items.list(second.id, order="asc", limit=2)
    ResponseItemList.model_validate_json(
        server.client.get(f"/v1/responses/{second.id}/input_items").content, strict=True
    )
    items: list[Any] = list(listed)  # of every kind that there is
    assert [item.role for item in items] == ["user", "assistant", "user"]  # the SDK turns the page
    newest: Any = sdk.responses.input_items.list(second.id).data[0]
    assert newest.content[0].text == "Say it again."

    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        sdk.responses.create(**GREEDY, previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"
    # The second one has the conversation of its own.
    sdk.responses.create(**GREEDY, max_output_tokens=1, previous_response_id=second.id)


def test_a_response_is_continued_without_a_word(sdk: openai.OpenAI, server: Server) -> None:
    first = sdk.responses.create(**GREEDY, max_output_tokens=4)
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    absent = sdk.responses.create(**fields, previous_response_id=first.id)
    empty = sdk.responses.create(**fields, previous_response_id=first.id, input=[])
    assert absent.output_text == empty.output_text != ""
    conversation = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.output_text}]
    chat = server.post("/v1/chat/completions", {"messages": conversation, "max_tokens": 8, "temperature": 0}).json()
    assert absent.output_text == chat["choices"][0]["message"]["content"]
    counted = sdk.responses.input_tokens.count(model=MODEL, previous_response_id=first.id)
    assert absent.usage is not None
    assert counted.input_tokens == absent.usage.input_tokens
    roles = [item.role for item in sdk.responses.input_items.list(absent.id, order="asc")]  # type: ignore[union-attr]
    assert roles == ["user", "assistant"]


def test_compacting_is_not_there(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not compacted"):
        sdk.responses.compact(model="gpt-5.2", input=QUESTION)


def test_items_of_a_kept_response_can_be_referred_to(sdk: openai.OpenAI) -> None:
    """As Vercel's `ai` sends a conversation."""
    first = sdk.responses.create(**GREEDY, max_output_tokens=16)
    question = {"role": "user", "content": QUESTION}
    again = {"role": "user", "content": "Say it again."}

    def ask(item: dict[str, Any]) -> openai.types.responses.Response:
        body = {**GREEDY, "input": [question, item, again], "max_output_tokens": 8}
        return sdk.responses.create(**body)

    whole = ask({"role": "assistant", "content": first.output_text})
    referred = ask({"type": "item_reference", "id": first.output[0].id})
    assert referred.output_text == whole.output_text
    assert referred.usage is not None
    assert whole.usage is not None
    assert referred.usage.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as unknown:
        ask({"type": "item_reference", "id": "msg_x_0"})
    assert unknown.value.param == "input.1.id"


def test_a_response_that_shall_not_be_kept_is_not(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(**GREEDY, max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_a_running_response_can_be_seen_and_cancelled(sdk: openai.OpenAI, server: Server) -> None:
    before = server.wait_idle()
    extra = {"ignore_eos": True}
    with sdk.responses.create(**GREEDY, max_output_tokens=4000, stream=True, extra_body=extra) as stream:
        created = next(stream)
        assert created.type == "response.created"
        running = sdk.responses.retrieve(created.response.id)
        assert running.status == "in_progress"
        assert sdk.responses.cancel(created.response.id).status == "cancelled"
        *_, last = stream
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    after = server.wait_idle()
    assert after.aborted == before.aborted + 1
    assert sdk.responses.retrieve(created.response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(created.response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_nothing")


def test_a_response_that_was_cancelled_before_it_was_told_can_be_retrieved(sdk: openai.OpenAI, server: Server) -> None:
    body = {**GREEDY, "max_output_tokens": 4000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/responses", body, **{"x-request-id": "cancelled-early"})
        server.wait_until(lambda now: now.running == 1)
        cancelled = sdk.responses.cancel("resp_cancelled-early")
        assert cancelled.status == "cancelled"
        assert asked.result().status_code == 409
    assert sdk.responses.retrieve(cancelled.id) == cancelled
    assert [item.id for item in sdk.responses.input_items.list(cancelled.id)]
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(cancelled.id)


def test_items_that_are_sent_twice_are_listed_twice_and_pages_end(sdk: openai.OpenAI) -> None:
    turn: dict[str, Any] = {"type": "message", "id": "msg_same", "role": "user", "content": "Hello"}
    turns: Any = [turn, {**turn, "id": "msg_other"}, turn, turn]
    response = sdk.responses.create(model=MODEL, input=turns, max_output_tokens=1)
    items = list(itertools.islice(sdk.responses.input_items.list(response.id, order="asc", limit=1), 10))
    assert [item.id for item in items][:2] == ["msg_same", "msg_other"]
    assert len({item.id for item in items}) == len(items) == 4


# --- what goes wrong


@pytest.mark.slow
def test_a_conversation_that_is_too_long_loses_its_oldest_turns(sdk: openai.OpenAI) -> None:
    room = 2100  # what the answer leaves of the context to the prompt
    turns: list[Any] = [{"role": "user", "content": f"{number} " + "word " * 300} for number in range(8)]
    end: list[Any] = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": MODEL, "instructions": "Be brief."}
    cut = sdk.responses.create(
        **fields, input=[*turns, *end], truncation="auto", temperature=0, max_output_tokens=4096 - room
    )
    assert cut.truncation == "auto"
    counts = [sdk.responses.input_tokens.count(**fields, input=[*turns[k:], *end]).input_tokens for k in range(8)]
    assert cut.usage.input_tokens == next(count for count in counts if count <= room)
    assert counts[0] > room


def test_search_that_others_run_is_an_offer_that_is_not_taken(server: Server) -> None:
    body = {**GREEDY, "max_output_tokens": 1, "tools": [{"type": "web_search"}]}
    response = server.post("/v1/responses", body).json()
    assert response["tools"] == []
    assert server.post("/v1/responses", {**body, "tool_choice": "required"}).status_code == 400


def test_a_failure_in_mid_stream_is_the_last_event(sdk: openai.OpenAI, server: Server) -> None:
    extra = {"ignore_eos": True, "timeout": 2.5}
    events = list(sdk.responses.create(**GREEDY, max_output_tokens=4000, stream=True, extra_body=extra))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.code == "server_error"
    server.wait_idle()


def test_a_client_that_leaves_in_mid_stream_frees_its_slot(server: Server) -> None:
    before = server.wait_idle()
    with server.connect() as client:
        client.post("/v1/responses", {**GREEDY, "max_output_tokens": 4000, "ignore_eos": True, "stream": True})
        assert client.read_head().status_code == 200
        created = next(sse_events(client.chunks()))
        client.leave_with_rst()
    server.wait_until(lambda now: now.aborted > before.aborted)
    after = server.wait_idle()
    assert after.aborted == before.aborted + 1
    assert server.client.get(f"/v1/responses/{created['response']['id']}").status_code == 404
