"""Messages and their events: the stream adds up to the message, in the order that SDKs need."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from pydantic import TypeAdapter
from pydantic_core import from_json

from engine.messages import FinishReason
from protocol.anthropic.messages import MessagesRequest
from protocol.anthropic.output import MessageBodyWriter, MessageStreamWriter
from protocol.errors import ApiError
from protocol.syntax.message_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tests.protocol.message_scripts import outputs_for, scripted, scripts
from tests.protocol.wire_helpers import output
from tests.support.raw_client import sse_events

EVENT = TypeAdapter(RawMessageStreamEvent)


def request(show_thinking=True, max_tokens=8) -> MessagesRequest:
    thinking = {"type": "adaptive", "display": "summarized" if show_thinking else "omitted"}
    body = {"max_tokens": max_tokens, "messages": [{"role": "user", "content": "Hi"}], "thinking": thinking}
    return MessagesRequest.model_validate(body)


def message_of(script, *, show_thinking=True, beyond=0, **ending) -> dict[str, Any]:
    """`beyond` is by how many tokens `max_tokens` is more than there are."""
    outputs = list(outputs_for(script, **ending))
    limit = outputs[-1].num_output_tokens + beyond
    writer = MessageBodyWriter(request(show_thinking, limit), scripted(script))
    for each in outputs:
        writer.feed_output(each)
    body = writer.body()
    Message.model_validate_json(body, strict=True)
    return orjson.loads(body)


def events_of(script, *, show_thinking=True, **ending) -> list[dict[str, Any]]:
    stream = MessageStreamWriter(request(show_thinking), scripted(script))
    frames = b"".join([*map(stream.feed_output, outputs_for(script, **ending)), stream.finish_stream()])
    events = list(sse_events([frames]))
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_json(orjson.dumps(event), strict=True)
    return events


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to. Asserts that blocks follow each other and everything ends."""
    first, *middle, delta, last = [event for event in events if event["type"] != "ping"]
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    arguments, is_open = "", False
    for event in middle:
        blocks = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open, arguments = True, ""
                blocks.append(event["content_block"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
                if arguments:
                    blocks[-1]["input"] = from_json(arguments, allow_partial=True)
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        blocks[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        blocks[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": signature}:
                        blocks[-1]["signature"] = signature
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


@pytest.mark.slow
@settings(deadline=None)
@given(script=scripts())
def test_the_stream_adds_up_to_the_message(script):
    message = message_of(script)
    events = events_of(script)
    added = accumulate(events)
    for number, (streamed, block) in enumerate(zip(added["content"], message["content"], strict=True)):
        if streamed["type"] == "tool_use" and block["type"] == "text":  # a stream has announced it before it was cut
            pieces = [
                event["delta"]["partial_json"] for event in events if event.get("index") == number and "delta" in event
            ]
            assert block["text"] == f'{{"name": "{streamed["name"]}", "arguments": {"".join(pieces)}'
            assert message["stop_reason"] == "max_tokens"
            added["content"][number] = block
    assert added == message


@pytest.mark.slow
@settings(deadline=None)
@given(script=scripts())
def test_hidden_thinking_is_a_block_without_its_text(script):
    message = message_of(script, show_thinking=False)
    assert all(block.get("thinking", "") == "" for block in message["content"])
    whole = message_of(script)
    assert [block["type"] for block in message["content"]] == [block["type"] for block in whole["content"]]
    assert not any(event.get("delta", {}).get("thinking") for event in events_of(script, show_thinking=False))


TEXT = [[ContentDelta("Hi")]]
CALL = [[ContentDelta("Hi"), ToolCallStart(0, "call_0", "look"), ToolCallArguments(0, '{"at": "it"}')]]
CUT = [[ContentDelta("Hi"), ToolCallStart(0, "call_0", "look"), ToolCallArguments(0, '{"at": "it')]]


@pytest.mark.parametrize(
    ("script", "ending", "stop_reason", "stop_sequence"),
    [
        (TEXT, {}, "end_turn", None),
        (TEXT, {"stop_reason": "END"}, "stop_sequence", "END"),
        (TEXT, {"finish": FinishReason.LENGTH}, "max_tokens", None),
        (TEXT, {"finish": FinishReason.LENGTH, "beyond": 1}, "model_context_window_exceeded", None),
        (TEXT, {"finish": FinishReason.ABORT, "beyond": 1}, "max_tokens", None),
        (CALL, {}, "tool_use", None),
        (CALL, {"finish": FinishReason.LENGTH}, "max_tokens", None),
        (CUT, {}, "max_tokens", None),
        (CUT, {"stop_reason": "END"}, "max_tokens", None),
        (CUT, {"finish": FinishReason.LENGTH, "beyond": 1}, "model_context_window_exceeded", None),
    ],
)
def test_why_a_message_ends(script, ending, stop_reason, stop_sequence):
    message = message_of(script, **ending)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert [block["type"] for block in message["content"][1:]] == ["tool_use"] * (script is CALL) + ["text"] * (
        script is CUT
    )
    if "finish" not in ending:
        assert accumulate(events_of(script, **ending))["stop_reason"] == stop_reason


def test_a_call_is_a_block_with_its_input():
    assert message_of(CALL)["content"][1] == {
        "type": "tool_use",
        "id": "call_0",
        "name": "look",
        "input": {"at": "it"},
    }


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": 1' + "0" * 400 + "}", '{"a": ' + "[" * 250 + "]" * 250 + "}"]
)
def test_whole_arguments_are_the_input_whatever_they_hold(arguments):
    writer = MessageBodyWriter(request(), scripted([[ToolCallStart(0, "c", "f"), ToolCallArguments(0, arguments)]]))
    writer.feed_output(output("x", finish=FinishReason.STOP))
    [block] = json.loads(writer.body())["content"]
    assert block["input"] == json.loads(arguments)


def test_the_inputs_together_are_the_prompt():
    usage = message_of([[ReasoningDelta("Hm")], [ContentDelta("Yes")]])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 4)
    assert usage["output_tokens"] == 4
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT])
def test_an_output_that_failed_is_an_error_and_not_an_answer(reason):
    with pytest.raises(ApiError):
        message_of(TEXT, finish=reason)
    with pytest.raises(ApiError):
        events_of(TEXT, finish=reason)


def test_a_stream_that_fails_ends_with_an_error_event():
    stream = MessageStreamWriter(request(), scripted(TEXT, request_id="r-1"))
    stream.feed_output(output("x"))
    [event] = sse_events([stream.fail_stream(ApiError(503, "Down."), [])])
    error = ErrorResponse.model_validate(event, strict=True)
    assert error.error.type == "overloaded_error"
    assert error.error.message == "Down."
    assert error.request_id == "r-1"
