"""Misspelt fields inside a request's objects come back with their path and the field that was probably meant."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from protocol.anthropic.messages import MessagesRequest
from protocol.body import MAX_NOTED, parse_body
from protocol.errors import ApiError
from protocol.ollama.requests import OllamaChatRequest
from protocol.openai.chat import ChatCompletionRequest
from protocol.request_fields import RequestFields
from protocol.responses.request import ResponsesRequest

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def warning(model: type[RequestFields], **body: Any) -> str:
    return parse_body(model, orjson.dumps(body)).left_out.warning() or ""


@pytest.mark.parametrize(
    ("body", "path", "meant"),
    [
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "response_format.json_schema.shema",
            "schema",
        ),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameter": {}}}]},
            "tools.1.function.parameter",
            "parameters",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "a", "tool_call": [CALL]}, USER]}, "messages.1.tool_call",
         "tool_calls"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_slip_that_leaves_a_whole_request_is_warned_of(body: dict[str, Any], path: str, meant: str) -> None:
    said = warning(ChatCompletionRequest, **{"messages": [USER], **body})
    assert said == f"fields without effect: {path} (did you mean {meant}?) (this server does not use them)"


@pytest.mark.parametrize(
    ("body", "wrong", "slip"),
    [
        ({"messages": [USER, {"role": "user", "contnet": "a"}]}, "messages.1.content",
         "messages.1.contnet (did you mean content?)"),
        ({"messages": [USER], "tools": [{"type": "function", "functoin": {"name": "f"}}]}, "tools.0.function",
         "tools.0.functoin (did you mean function?)"),
        ({"messages": [USER], "response_format": {"type": "json_schema", "json_shema": {}}},
         "response_format.json_schema", "response_format.json_shema (did you mean json_schema?)"),
        ({"mesages": [USER]}, "messages", "mesages (did you mean messages?)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_names_the_slip_beside_the_field_that_is_missing(body: dict[str, Any], wrong: str, slip: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(ChatCompletionRequest, orjson.dumps(body))
    assert caught.value.param == wrong
    assert caught.value.message.endswith(f" Unknown: {slip}.")


def test_other_dialects_name_slips_by_their_own_paths() -> None:
    said = warning(MessagesRequest, max_tokens=9, messages=[USER], thinking={"type": "adaptive", "dsplay": "omitted"})
    assert "thinking.dsplay (did you mean display?)" in said
    assert "reasoning.efort (did you mean effort?)" in warning(ResponsesRequest, input="a", reasoning={"efort": "low"})
    said = warning(OllamaChatRequest, messages=[USER], options={"temprature": 0})
    assert said.count("temprature") == 1


def test_what_apis_have_beside_our_fields_is_no_slip() -> None:
    """Clients send an answer's whole message again, and objects have fields of each vendor."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "annotations": [],
        "audio": None,
        "refusal": None,
        "tool_calls": [],
    }
    assert not warning(ChatCompletionRequest, messages=[USER, answer | {"images": [], "index": 0}, USER])
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}]
    thought = {"type": "thinking", "thinking": "b", "signature": "c"}
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": [thought, *blocks]}]
    assert not warning(MessagesRequest, max_tokens=9, messages=turns)
    # No hint names a field that the object already has: here "content".
    assert not warning(ChatCompletionRequest, messages=[USER | {"contents": []}])
    # A schema is the client's own.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"typ": "object", "propertis": {}}}}
    assert not warning(ChatCompletionRequest, messages=[USER], tools=[tool])


def test_hostile_names_cost_little_and_are_not_repeated() -> None:
    made_up = {f"conten{number}": number for number in range(500)}
    hostile = [{**USER, **made_up} for _ in range(40)] + [{"role": "user", "content\r\nt": "a", "content": "b"}] * 100
    whole, strange = orjson.dumps({"messages": hostile}), orjson.dumps({"messages": [USER] * len(hostile)})
    usual = min(seconds(strange) for _ in range(3))
    took = min(seconds(whole) for _ in range(3))
    weight = len(whole) / len(strange)
    assert took < usual * weight + 0.2, "the comparisons have a bound, whatever the number of fields"
    with pytest.raises(ApiError) as caught:
        parse_body(ChatCompletionRequest, orjson.dumps({"messages": [{"role": "user", **made_up}]}))
    assert caught.value.message.count("did you mean") <= MAX_NOTED
    deep: Any = {"contnet": 1, "role": "user"}
    for _ in range(100):
        deep = {"x" * 1000: [deep]}
    with pytest.raises(ApiError) as caught:
        parse_body(ChatCompletionRequest, orjson.dumps({"messages": [{"role": "user", "x": deep, "contnet": "a"}]}))
    assert len(caught.value.message) < 400


def seconds(body: bytes) -> float:
    began = time.process_time()
    parse_body(ChatCompletionRequest, body)
    return time.process_time() - began
