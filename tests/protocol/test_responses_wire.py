"""The response object and its events: in order, every key there, and the last event tells what the others told."""

from __future__ import annotations

import gc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.messages import FinishReason
from protocol.answers import Head
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.openai.chat import ChatMessage
from protocol.openai.logprobs import ChatLogprobs
from protocol.responses.items import chat_messages, stored_items
from protocol.responses.output import CANCELLED, ResponseBodyWriter, ResponseStreamWriter
from protocol.responses.request import ResponsesRequest, beginning_at, beginnings, fit
from protocol.responses.tools import CallForm
from protocol.syntax.message_parts import (
    ContentDelta,
    MessageFormat,
    MessagePart,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from protocol.syntax.reasoning import THINK
from protocol.syntax.record import Reading, new_openai_id
from protocol.syntax.registry import HERMES
from protocol.tools.kinds import KINDS, Function, ToolUse
from tests.protocol.message_scripts import ScriptedParser, outputs_for, scripts
from tests.protocol.wire_helpers import lp, output, token_bytes
from tests.support.raw_client import sse_events

HEAD = Head(id="resp_1", created=1_700_000_000, model="smol")
EVENT = TypeAdapter(ResponseStreamEvent)
ECHO = parse_body(ResponsesRequest, b'{"input": "Hi"}').echo() | {"store": True}
KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    *("prompt_cache_key", "user"),
}


def response_of(script, **ending) -> dict[str, Any]:
    writer = ResponseBodyWriter(HEAD, ECHO).read_with(ScriptedParser(script))
    for each in outputs_for(script, **ending):
        writer.feed_output(each)
    body = writer.body()
    Response.model_validate_json(body, strict=True)
    return orjson.loads(body)


def events_of(script, **ending) -> list[dict[str, Any]]:
    writer = ResponseStreamWriter(HEAD, ECHO).read_with(ScriptedParser(script))
    return checked(b"".join([*map(writer.feed_output, outputs_for(script, **ending)), writer.finish_stream()]))


def checked(frames: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each strictly of its type."""
    events = list(sse_events([frames]))
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        EVENT.validate_json(orjson.dumps(event), strict=True)
        if "response" in event:
            assert event["response"].keys() == KEYS
    return events


def accumulate(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events add up to. Asserts that everything begins, grows and ends in its turn."""
    items: list[dict[str, Any]] = []
    stage = "done"
    for event in events:
        kind = event["type"].removeprefix("response.")
        match kind:
            case "output_item.added":
                assert (stage, event["output_index"]) == ("done", len(items))
                items.append(event["item"])
                assert event["item"]["status"] == "in_progress"
                stage = "added"
                continue
            case "created" | "in_progress" | "completed" | "incomplete" | "failed":
                assert stage == "done"
                continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        match kind:
            case "content_part.added":
                assert (stage, event["part"]["text"]) == ("added", "")
                item["content"].append(event["part"])
                stage = "part"
            case "output_text.delta" | "reasoning_text.delta":
                assert (stage, event["item_id"], event["content_index"]) == ("part", item["id"], 0)
                item["content"][0]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert (stage, event["text"]) == ("part", item["content"][0]["text"])
                stage = "text done"
            case "content_part.done":
                assert (stage, event["part"]) == ("text done", item["content"][0])
                stage = "parts done"
            case "function_call_arguments.delta":
                assert (stage, event["item_id"]) == ("added", item["id"])
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (stage, event["arguments"], event["name"]) == ("added", item["arguments"], item["name"])
                stage = "parts done"
            case "output_item.done":
                assert stage == "parts done"
                assert event["item"] == item | {"status": event["item"]["status"]}
                item["status"] = event["item"]["status"]
                stage = "done"
            case _:
                raise AssertionError(kind)
    return items


@pytest.mark.slow
@settings(deadline=None)
@given(script=scripts())
def test_the_events_add_up_to_the_response(script):
    response = response_of(script)
    events = events_of(script)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    cut = any(item["type"] == "function_call" and not item["arguments"].endswith("}") for item in response["output"])
    assert events[-1]["type"] == f"response.{response['status']}" == f"response.{'incomplete' if cut else 'completed'}"
    assert accumulate(events) == events[-1]["response"]["output"] == response["output"]
    assert events[-1]["response"] | {"completed_at": 0} == response | {"completed_at": 0}
    assert len({item["id"] for item in response["output"]}) == len(response["output"]) > 0


@pytest.mark.slow
@settings(deadline=None)
@given(script=scripts())
def test_an_output_can_be_continued(script):
    """What was answered is input of the next request: thoughts, texts and calls in their order, nothing lost."""
    response = response_of(script)
    items = stored_items(response["output"])
    assert [item.listed() for item in items] == response["output"]
    messages = chat_messages(items)
    assert all(message["role"] == "assistant" for message in messages)
    calls = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    assert calls == [item["call_id"] for item in response["output"] if item["type"] == "function_call"]


def test_an_answer_that_is_cut_off_is_incomplete():
    script = [[ReasoningDelta("Hm")], [ContentDelta("Hi"), ContentDelta(" the")]]
    events = events_of(script, finish=FinishReason.LENGTH)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_usage_counts_what_was_cached_and_thought():
    assert response_of([[ReasoningDelta("Hm")], [ContentDelta("Hi")]])["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 9,
    }


CALL = [ToolCallStart(0, "call_0", "look"), ToolCallArguments(0, '{"at": "it"}')]


def test_a_call_is_an_item_with_its_arguments():
    [item] = response_of([CALL])["output"]
    assert (item["type"], item["call_id"], item["name"]) == ("function_call", "call_0", "look")
    assert item["arguments"] == '{"at": "it"}'


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [
        (ApiError(500, "Broken."), "response.failed", "failed"),
        (ApiError(409, "Stopped.", code=CANCELLED), "response.incomplete", "cancelled"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_that_fails_ends_with_the_response_so_far(error, name, status, begun):
    ended: list[dict[str, Any]] = []
    writer = ResponseStreamWriter(HEAD, ECHO, done=ended.append).read_with(ScriptedParser([[ContentDelta("Hi")]]))
    frames = writer.feed_output(output("Hi", num_output_tokens=1)) if begun else b""
    events = checked(frames + writer.fail_stream(error, [output(" you", num_output_tokens=3)]))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == name
    response = events[-1]["response"]
    assert [response] == ended
    assert response["status"] == status
    assert response["usage"]["output_tokens"] == 3
    assert [item["status"] for item in response["output"]] == ["incomplete"] * begun
    assert response["error"] == ({"code": "server_error", "message": "Broken."} if status == "failed" else None)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT])
def test_an_output_that_failed_is_an_error_and_not_an_answer(reason):
    with pytest.raises(ApiError):
        response_of([CALL], finish=reason)


def test_logprobs_are_those_of_the_text_and_not_of_the_reasoning():
    vocabulary = [b"<think>", b"Hm", b"</think>", b"Yes", b"."]
    parser = MessageFormat(reasoning=THINK).parser(vocabulary.__getitem__)
    writer = ResponseStreamWriter(HEAD, ECHO, write_logprobs=ChatLogprobs(vocabulary.__getitem__))
    writer.read_with(parser)
    frames = b"".join(
        writer.feed_output(output(word.decode(), token_ids=[token_id], logprobs=[lp(token_id)]))
        for token_id, word in enumerate(vocabulary)
    )
    frames += writer.feed_output(output("", finish=FinishReason.STOP)) + writer.finish_stream()
    events = checked(frames)
    [message] = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["Yes", "."]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for delta in deltas for entry in delta] == ["Yes", "."]


def test_what_is_kept_of_log_probabilities_is_nothing_that_the_garbage_collector_visits():
    writer = ResponseStreamWriter(HEAD, ECHO, write_logprobs=ChatLogprobs(lambda token_id: b"a"))
    writer.read_with(MessageFormat().parser(lambda token_id: b"a"))
    before = len(gc.get_objects())
    for _ in range(300):
        writer.feed_output(output("a", token_ids=[1], logprobs=[lp(1, top=[(1, -1.0), (2, -2.0)])]))
    assert len(gc.get_objects()) - before < 100
    [message] = orjson.loads(orjson.dumps(writer.response("in_progress")))["output"]
    assert len(message["content"][0]["logprobs"]) == 300


def test_what_is_one_turn_in_chat_is_one_message():
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, {"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}], "summary": [], "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a door"}]},
        {"role": "assistant", "content": "A wall."},
        {"role": "assistant", "content": "And a door."},
    ]
    messages = chat_messages(parse_body(ResponsesRequest, orjson.dumps({"input": conversation})).items())
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", *["assistant"] * 2]
    turn = messages[1]
    assert turn["reasoning"] == "Hm"
    assert turn["content"] == [{"type": "text", "text": "I look."}]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["look", "find"]


def test_no_text_is_still_a_message():
    response = response_of([[]])
    assert response["output"][0]["content"][0]["text"] == ""
    assert accumulate(events_of([[]])) == response["output"]


@pytest.mark.slow
@settings(deadline=None)
@given(
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=12),
    limit=st.integers(0, 12),
)
async def test_as_much_of_a_conversation_is_kept_as_fits(roles, limit):
    messages = [ChatMessage(role=role, content=str(number)) for number, role in enumerate(roles)]

    async def encode(candidate: list[ChatMessage]) -> list[str] | None:
        return [message.text() for message in candidate] if len(candidate) <= limit else None

    found = await fit(messages, encode)
    whole = [message.text() for message in messages]
    if len(whole) <= limit:
        assert found == whole
        return
    ends = [[m.text() for m in beginning_at(messages, begin)] for begin in beginnings(messages)]
    assert found == next((end for end in ends if len(end) <= limit), None)
    for end in ends:
        turns = [roles[int(number)] for number in end if roles[int(number)] != "system"]
        assert turns[0] != "tool"
        assert [number for number in end if roles[int(number)] == "system"] == [
            str(number) for number, role in enumerate(roles) if role == "system"
        ]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"a": 1}}', "completed"),
        ('{"a": 1}', "completed"),
        ('{"a": "by a sto', "incomplete"),
        ('{"a": 0', "incomplete"),
    ],
)
def test_a_call_that_is_cut_off_is_incomplete_and_so_is_its_response(text: str, status: str) -> None:
    reader = HERMES.reader(Reading(tools=ToolUse(functions=(Function(name="f"),)), new_call_id=new_openai_id))
    parser = MessageFormat(new_tool_reader=reader).parser(token_bytes)
    writer = ResponseBodyWriter(HEAD, ECHO).read_with(parser)
    writer.feed_output(output(f'<tool_call>{{"name": "f", "arguments": {text}', finish=FinishReason.STOP))
    response = orjson.loads(writer.body())
    (call,) = response["output"]
    assert (call["type"], call["status"], response["status"]) == ("function_call", status, status)
    assert [item.listed()["status"] for item in stored_items([call])] == [status]


def test_half_a_command_is_no_command_of_the_stream() -> None:
    script: list[list[MessagePart]] = [
        [ToolCallStart(0, "c0", "shell"), ToolCallArguments(0, '{"commands": ["rm -rf /')]
    ]
    writer = ResponseStreamWriter(HEAD, ECHO, call_forms={"shell": CallForm(KINDS["shell"], "shell")})
    writer.read_with(ScriptedParser(script))
    frames = b"".join([*map(writer.feed_output, outputs_for(script)), writer.finish_stream()])
    events = list(sse_events([frames]))
    assert not any("shell_call_command" in event["type"] for event in events)
    [item] = events[-1]["response"]["output"]
    assert (item["status"], events[-1]["response"]["status"]) == ("incomplete", "incomplete")
