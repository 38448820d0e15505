"""Answers of Ollama's API: the lines of a stream add up to the whole answer, and each is one line to every client."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama import ChatResponse, GenerateResponse

from engine.messages import FinishReason, RequestOutput
from protocol.answers import AnswerContext
from protocol.errors import ApiError
from protocol.ollama.output import KEEP_ALIVE, LinesWriter, ObjectWriter
from protocol.ollama.requests import GenerateRequest, OllamaChatRequest
from protocol.syntax.message_parts import MessagePart
from tests.protocol.message_scripts import outputs_for, scripted, scripts
from tests.protocol.test_message_wire import CALL, LENGTH, STOP, SYNTAX, TEXTS, TOOLS
from tests.protocol.wire_helpers import answer, lp, output, pieces_of, texts

SECONDS = (0.5, 1.0, 2.25)


def context(**fields: Any) -> AnswerContext:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    body = OllamaChatRequest(**given | fields).translate()
    return answer(message_format=body.message_format(SYNTAX, b""), durations=lambda: SECONDS)


def lines_of(data: bytes) -> list[dict[str, Any]]:
    """Read lines as httpx does: it ends them at every character that Python calls an end of line."""
    return [orjson.loads(line) for line in data.decode().splitlines()]


def stream(outputs: list[RequestOutput], made: AnswerContext, kind: type = OllamaChatRequest) -> list[dict[str, Any]]:
    writer = LinesWriter(kind(), made)
    return lines_of(b"".join([*map(writer.feed_output, outputs), writer.finish_stream()]))


def whole(outputs: list[RequestOutput], made: AnswerContext, kind: type = OllamaChatRequest) -> dict[str, Any]:
    writer = ObjectWriter(kind(), made)
    for each in outputs:
        writer.feed_output(each)
    return orjson.loads(writer.body())


def added_up(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the lines together as clients do."""
    message: dict[str, Any] = {}
    for line in lines:
        for name, value in line["message"].items():
            message[name] = value if name == "role" or name not in message else message[name] + value
    logprobs = [each for line in lines for each in line.get("logprobs", ())]
    return {**lines[-1], "message": message} | ({"logprobs": logprobs} if logprobs else {})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


@settings(max_examples=40)
@given(data=st.data(), finish=st.sampled_from([STOP, LENGTH]))
def test_the_lines_of_a_stream_are_the_whole_answer(data: st.DataObject, finish: FinishReason) -> None:
    pieces = data.draw(pieces_of(data.draw(st.sampled_from(TEXTS) | texts)))
    outputs = [*map(output, pieces), output("", finish=finish, num_output_tokens=7)]
    lines, body = stream(outputs, context()), whole(outputs, context())
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    found = added_up(lines)
    assert without_ids(found["message"]) == without_ids(body["message"])
    assert {**found, "message": None} == {**body, "message": None}
    for line in lines:
        ChatResponse.model_validate(line)


def test_a_message_has_thinking_content_and_calls_with_objects() -> None:
    lines = stream([output("<think>Hm.</think>I look. "), output(CALL), output("", finish=STOP)], context())
    assert [line["message"].get("thinking", "") for line in lines] == ["Hm.", "", "", ""]
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    [call] = lines[2]["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": "é"}}
    assert lines[-1]["done_reason"] == "stop"


def test_a_call_that_was_cut_is_text_and_the_answer_counts_as_cut() -> None:
    outputs = [output(CALL[: CALL.index("é")]), output("", finish=LENGTH)]
    for found in (added_up(stream(outputs, context())), whole(outputs, context())):
        assert "tool_calls" not in found["message"]
        assert '{"name": "f", "arguments": {"a"' in found["message"]["content"]
        assert found["done_reason"] == "length"
    ended = whole([output(CALL[: CALL.index("é")]), output("", finish=STOP)], context())
    assert ended["done_reason"] == "length"


def test_arguments_over_several_lines_stay_one_line() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {\r\n "a":\n "\\n\u2028"}}\n</tool_call>'
    lines = stream([output(call), output("", finish=STOP)], context())
    assert lines[0]["message"]["tool_calls"][0]["function"]["arguments"] == {"a": "\n\u2028"}


def test_durations_are_nanoseconds_and_add_up() -> None:
    end = stream([output("a", finish=STOP, num_output_tokens=3)], context())[-1]
    assert [end[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")] == [
        500_000_000,
        1_000_000_000,
        2_250_000_000,
    ]
    assert end["total_duration"] == 3_750_000_000
    assert (end["prompt_eval_count"], end["eval_count"]) == (5, 3)


def test_generate_has_its_text_in_response() -> None:
    outputs = [output("<think>Hm.</think>Yes"), output("", finish=STOP)]
    lines, body = stream(outputs, context(), GenerateRequest), whole(outputs, context(), GenerateRequest)
    assert [line["response"] for line in lines] == ["", "Yes", ""]
    assert lines[0]["thinking"] == body["thinking"] == "Hm."
    assert body["response"] == "Yes"
    assert "message" not in body
    GenerateResponse.model_validate(body)


@pytest.mark.parametrize("text", ["a", ""])
def test_every_token_with_logprobs_has_them_once(text: str) -> None:
    outputs = [output(text, logprobs=[lp(0, top=[(1, -1.0)])]), output("", logprobs=[lp(1)], finish=STOP)]
    lines, body = stream(outputs, context()), whole(outputs, context())
    assert added_up(lines)["logprobs"] == body["logprobs"]
    assert [each["token"] for each in body["logprobs"]] == ["The", " cat"]
    assert body["logprobs"][0]["top_logprobs"][0]["logprob"] == -1.0


def test_an_error_is_a_line_of_its_own() -> None:
    writer = LinesWriter(OllamaChatRequest(), context())
    assert writer.fail_stream(ApiError(500, "It broke.")) == b'{"error":"It broke."}\n'


def test_a_line_that_keeps_the_connection_says_nothing_to_either_kind_of_client() -> None:
    [line] = lines_of(KEEP_ALIVE)
    assert ChatResponse.model_validate(line).message.content == ""
    assert GenerateResponse.model_validate(line).response == ""
    assert line["done"] is False


@settings(max_examples=40)
@given(script=scripts())
def test_the_parts_of_any_message_are_the_same_streamed_and_whole(script: list[list[MessagePart]]) -> None:
    outputs = outputs_for(script)
    lines, body = stream(outputs, scripted(script)), whole(outputs, scripted(script))
    assert added_up(lines)["message"] == body["message"]
