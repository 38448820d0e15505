"""The `anthropic` package, synchronous and not, against /v1/messages; every body and event is strictly its type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import anyio
import orjson
import pytest
from anthropic.types import (
    Message,
    MessageParam,
    RawMessageStreamEvent,
    TextBlock,
    ToolChoiceAnyParam,
    ToolParam,
    ToolUseBlock,
)
from anthropic.types.beta import BetaCacheControlEphemeralParam, BetaTextBlock
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.support.harness import MODEL, TIMEOUT, Server
from tests.support.raw_client import sse_events

QUESTION: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
EVENT = TypeAdapter(RawMessageStreamEvent)
GREEDY = {"temperature": 0}
CONTEXT = 4096  # the server's max_model_len


@pytest.fixture
def sdk(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def text_of(block: object) -> str:
    assert isinstance(block, TextBlock | BetaTextBlock)
    return block.text


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 16, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/messages", {"messages": QUESTION, "max_tokens": 16, "stream": True, **GREEDY, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(sse_events([answer.content]))


def test_message(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(model=MODEL, messages=QUESTION, max_tokens=32, extra_body=GREEDY)
    [block] = message.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert message.stop_reason == "end_turn"
    assert message._request_id is not None
    assert message.id == f"msg_{message._request_id}"


def test_body_is_strictly_a_message(server: Server) -> None:
    body = server.post("/v1/messages?beta=true", {"messages": QUESTION, "max_tokens": 3}).content
    message = Message.model_validate_json(body, strict=True)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3
    assert orjson.loads(body).keys() >= {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence"}


def test_stream_helper_accumulates_the_same_message(sdk: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "extra_body": GREEDY}
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final.content[0]) == text_of(whole.content[0])
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    # The second prompt was found in the cache, as a part; together the inputs are the prompt.
    assert final.usage.cache_read_input_tokens is not None
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


async def test_async_stream(server: Server) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=server.base_url, api_key="none", max_retries=0) as sdk,
        sdk.messages.stream(model=MODEL, messages=QUESTION, max_tokens=32, extra_body=GREEDY) as stream,
    ):
        with anyio.fail_after(TIMEOUT):
            assert "Paris" in await stream.get_final_text()


def test_events_come_in_order_and_are_strictly_their_types(server: Server) -> None:
    events = events_of(server, max_tokens=32)
    names = [event["type"] for event in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_json(orjson.dumps(event), strict=True)


def test_stop_sequence_is_named(server: Server) -> None:
    whole = ask(server)["content"][0]["text"]
    word = whole.split()[3]
    stopped = ask(server, stop_sequences=["never said", word])
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["stop_sequence"] == word
    assert stopped["content"][0]["text"] == whole[: whole.index(word)]


def test_an_answer_without_text_is_one_empty_block(server: Server) -> None:
    whole = ask(server)["content"][0]["text"]
    stop = {"stop_sequences": [whole[:1]]}
    assert ask(server, **stop)["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in events_of(server, **stop)] == [
        *("message_start", "content_block_start", "ping", "content_block_stop", "message_delta", "message_stop"),
    ]


def test_blocks_and_system_are_the_conversation_that_chat_has(server: Server) -> None:
    """Every spelling of one conversation is one prompt and so one greedy answer."""
    system = "You are a pirate."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who are\nyou?"}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Who are", **cached}, {"type": "text", "text": "you?"}]
    for spelled in (
        {"system": system, "messages": [{"role": "user", "content": "Who are\nyou?"}]},
        {"system": [{"type": "text", "text": system, **cached}], "messages": [{"role": "user", "content": parts}]},
        {"system": system, "messages": [{"role": "user", "content": [part]} for part in parts]},
    ):
        message = ask(server, max_tokens=12, **spelled)
        assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_count_tokens(sdk: anthropic.Anthropic, server: Server) -> None:
    system = "Be brief."
    count = sdk.messages.count_tokens(model=MODEL, messages=QUESTION, system=system)
    usage = ask(server, system=system, max_tokens=1)["usage"]
    assert count.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    too_long: list[MessageParam] = [{"role": "user", "content": "word " * 5000}]
    assert sdk.messages.count_tokens(model=MODEL, messages=too_long).input_tokens > 4096


def test_what_coding_agents_send_is_taken(sdk: anthropic.Anthropic) -> None:
    """The beta route and its headers, caches, budgets, accounting, and fields that mean nothing here."""
    cached: BetaCacheControlEphemeralParam = {"type": "ephemeral", "ttl": "1h"}
    with sdk.beta.messages.stream(
        model=MODEL,
        max_tokens=1500,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "You are an agent.", "cache_control": cached},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Hi</system-reminder>"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is the capital of France?", "cache_control": cached}],
            },
        ],
        metadata={"user_id": "user_1_session_2"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        extra_body={**GREEDY, "output_config": {"effort": "low"}},
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert "Paris" in text_of(message.content[0])


# --- tools and formats

CITIES = ["Paris", "Rome"]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


ONE_CALL: ToolChoiceAnyParam = {"type": "any", "disable_parallel_tool_use": True}


def test_a_tool_that_has_to_be_used_is_used(sdk: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 100,
        "tools": [WEATHER],
        "extra_body": GREEDY,
    }
    whole = sdk.messages.create(**fields, tool_choice=ONE_CALL)
    assert whole.stop_reason == "tool_use"
    [block] = whole.content
    assert block.type == "tool_use"
    assert block.name == "get_weather"
    assert block.input["city"] in CITIES
    with sdk.messages.stream(**fields, tool_choice={"type": "tool", "name": "get_weather"}) as stream:
        final = stream.get_final_message()
    [block] = final.content
    assert isinstance(block, ToolUseBlock)
    assert block.input["city"] in CITIES
    assert final.stop_reason == "tool_use"


def test_events_of_a_tool_are_strictly_their_types(server: Server) -> None:
    events = events_of(server, tools=[WEATHER], tool_choice=ONE_CALL, max_tokens=100)
    start = next(event for event in events if event["type"] == "content_block_start")
    assert start["content_block"].keys() == {"type", "id", "name", "input"}
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_json(orjson.dumps(event), strict=True)


def test_a_tools_result_goes_back_into_the_conversation(sdk: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "extra_body": GREEDY}
    asked = sdk.messages.create(**fields, messages=QUESTION, max_tokens=100, tool_choice=ONE_CALL)
    [call, *_] = [block for block in asked.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    answer = sdk.messages.create(**fields, messages=messages, max_tokens=8, tool_choice={"type": "none"})
    assert {block.type for block in answer.content} == {"text"}
    without = sdk.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER])
    assert without.input_tokens > sdk.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def test_a_format_is_kept(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        [block] = ask(server, max_tokens=60, **fields)["content"]
        assert orjson.loads(block["text"])["city"] in CITIES


def test_an_answer_that_the_client_has_begun_is_continued(server: Server) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    assert ask(server, messages=begun, max_tokens=4)["content"][0]["text"].startswith(" Paris")


# --- what goes wrong

# Each: the path below /v1/messages, the body, and words that the message must hold.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "messages is required"),
    ("", {"messages": QUESTION}, "max_tokens is required"),
    ("", {"messages": [], "max_tokens": 1}, "messages must be an array of at least 1"),
    ("", {"messages": QUESTION, "max_tokens": 0}, "max_tokens must be at least 1, or -1"),
    ("", {"messages": QUESTION, "max_tokens": 1, "temperature": 3}, "temperature must be in"),
    ("", {"messages": QUESTION, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences must not"),
    ("", {"messages": QUESTION, "max_tokens": 1, "stop_sequences": ["a"] * 17}, "stop_sequences takes at most 16"),
    ("", {"messages": [{"role": "tool", "content": "a"}], "max_tokens": 1}, "messages.0.role"),
    ("", {"messages": [{"role": "user"}], "max_tokens": 1}, "messages.0.content is required"),
    ("", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "'image'"),
    ("", {"messages": [{"role": "user", "content": [{"type": "text"}]}], "max_tokens": 1}, "content.0.text is req"),
    ("", {"messages": QUESTION, "max_tokens": 1, "system": 5}, "system must be a string or an array"),
    ("", {"messages": QUESTION, "max_tokens": 1, "thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    (
        "",
        {"messages": QUESTION, "max_tokens": 1024, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens must be less than max_tokens",
    ),
    ("", {"messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ("", {"messages": QUESTION, "max_tokens": 1, "mcp_servers": 5}, "mcp_servers"),
    ("", {"messages": QUESTION, "max_tokens": 1, "tools": [{"type": 5}]}, "tools.0.type is no string"),
    ("", {"messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 1}, "prompt is too long"),
    (
        "",
        {
            "messages": QUESTION,
            "max_tokens": 1,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}},
        },
        "output_config.format",
    ),
    ("", {"messages": QUESTION, "max_tokens": 1, "n": 2}, "n is not supported"),
    ("", {"messages": QUESTION, "max_tokens": 1, "stop": "a"}, "stop is not supported"),
    ("/count_tokens", {}, "messages is required"),
]


def error_of(answer: Any, status: int, kind: str) -> str:
    """The message of an error answer, which has to be Anthropic's envelope and nothing else."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return body["error"]["message"]


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_bad_request_names_the_field_in_anthropics_envelope(
    server: Server, path: str, body: dict[str, Any], words: str
) -> None:
    answer = server.post(f"/v1/messages{path}", {"stream": True, **body})
    assert words in error_of(answer, 400, "invalid_request_error")
    ErrorResponse.model_validate_json(answer.content, strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_is_refused_in_the_words_at_which_agents_shorten_it(server: Server, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 5000}]
    counted = server.post("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"]
    answer = server.post("/v1/messages", {"messages": messages, "max_tokens": 1, "stream": stream})
    told = error_of(answer, 400, "invalid_request_error")
    assert told == f"prompt is too long: {counted} tokens > {CONTEXT} maximum"

    # One that fills the context has no room for an answer, so the maximum is below it.
    room = counted - CONTEXT
    messages = [{"role": "user", "content": "word " * (5000 - room)}]
    told = error_of(server.post("/v1/messages", {"messages": messages, "max_tokens": 1}), 400, "invalid_request_error")
    assert told == f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum"


def test_a_prompt_that_is_too_long_to_be_counted_is_refused_in_the_same_words(server: Server) -> None:
    longest = {"messages": [{"role": "user", "content": "word " * 800_000}]}
    for path, body in (("", {**longest, "max_tokens": 1}), ("/count_tokens", longest)):
        told = error_of(server.post(f"/v1/messages{path}", body), 400, "invalid_request_error")
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", told)
        assert found
        assert int(found[1]) > int(found[2]) == CONTEXT


def test_every_other_refusal_has_anthropics_envelope(server: Server) -> None:
    good = {"messages": QUESTION, "max_tokens": 1}
    assert "JSON" in error_of(server.client.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    assert "gpt-4o" in error_of(server.post("/v1/messages", {**good, "model": "gpt-4o"}), 404, "not_found_error")
    error_of(server.post("/v1/messages/nothing", good), 404, "not_found_error")
    error_of(server.client.get("/v1/messages"), 405, "invalid_request_error")
    error_of(server.client.post("/v1/messages", content=b" " * (2**24 + 1)), 413, "request_too_large")
    error_of(server.post("/v1/messages", {**good, "timeout": 0.001}), 504, "timeout_error")
    many = {f"x-{number}": "a" for number in range(130)}
    error_of(server.post("/v1/messages", good, **many), 431, "invalid_request_error")


def test_models_are_listed_and_found_as_anthropics_clients_read_them(sdk: anthropic.Anthropic, server: Server) -> None:
    [model] = sdk.models.list()
    assert model.model_extra == {}
    assert model == sdk.models.retrieve(MODEL)
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.tzinfo is not None
    assert model.max_input_tokens == 4096
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.models.retrieve("claude")
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id is not None

    as_anthropics = {"anthropic-version": "2023-06-01"}
    answer = server.client.get("/v1/models?limit=0", headers=as_anthropics)
    assert error_of(answer, 400, "invalid_request_error").endswith("from 1 to 1000, got '0'.")
    error_of(server.client.post("/v1/models", headers=as_anthropics), 405, "invalid_request_error")
    assert server.client.get("/v1/models").json()["object"] == "list"
    assert server.client.get("/v1/models/claude").json()["error"]["code"] == "model_not_found"


def test_errors_become_the_sdks_own(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(model="claude", messages=QUESTION, max_tokens=1)
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        sdk.messages.create(model=MODEL, messages=QUESTION, max_tokens=0)


def test_an_error_in_mid_stream_is_an_error_event(sdk: anthropic.Anthropic, server: Server) -> None:
    extra = {"ignore_eos": True, "timeout": 2.5, **GREEDY}
    received: list[str] = []
    with (
        sdk.messages.stream(model=MODEL, messages=QUESTION, max_tokens=4000, extra_body=extra) as stream,
        pytest.raises(anthropic.APIStatusError) as ended,
    ):
        received.extend(stream.text_stream)
    assert received
    assert ended.value.type == "timeout_error"
    server.wait_idle()


def test_a_client_that_leaves_in_mid_stream_frees_its_slot(server: Server) -> None:
    before = server.wait_idle()
    with server.connect() as client:
        client.post("/v1/messages", {"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True})
        assert client.read_head().status_code == 200
        assert next(sse_events(client.chunks()))["type"] == "message_start"
        client.leave_with_rst()
    server.wait_until(lambda now: now.aborted > before.aborted)
    after = server.wait_idle()
    assert after.aborted == before.aborted + 1
    assert after.generation_tokens < before.generation_tokens + 4000
