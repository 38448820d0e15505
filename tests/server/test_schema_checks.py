"""What no grammar can enforce of a schema without `strict` is checked when the answer is there, and told beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.harness import MODEL, TIMEOUT, Server
from tests.server.raw_client import sse_events

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def pair(first: str, second: str) -> dict[str, Any]:
    """Two different texts, as an array: a grammar enforces all but that they differ."""
    items = [{"const": first}, {"const": second}]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2, "uniqueItems": True}


def of_pair(first: str, second: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"tags": pair(first, second)}, "required": ["tags"]}


def json_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "tags", "schema": schema, **more}}


TOLD = {"not_enforced": ["/properties/tags/uniqueItems"]}
VALID = {**TOLD, "valid": True, "errors": []}
INVALID = {**TOLD, "valid": False, "errors": ["/tags: the value has non-unique elements"]}
UNKNOWN = {**TOLD, "valid": None, "errors": []}


def asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {**schema, "additionalProperties": False}
    return {"messages": HELLO, "max_tokens": 100, "response_format": json_schema(closed), **more}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


@pytest.mark.parametrize(
    ("schema", "more", "told"),
    [
        (of_pair("a", "b"), {}, VALID),
        (of_pair("a", "a"), {}, INVALID),
        (of_pair("a", "b"), {"max_tokens": 2}, UNKNOWN),
        (of_pair("a", "a"), {"max_tokens": 2}, UNKNOWN),
    ],
    ids=["valid", "invalid", "cut off", "cut off, too"],
)
def test_each_choice_tells_what_was_checked(server: Server, schema: dict, more: dict, told: dict) -> None:
    body = asked(schema, n=2, **more)
    choices = server.post(CHAT, body).json()["choices"]
    assert [choice["structured_output"] for choice in choices] == [told, told]
    with server.connect() as client:
        client.post(CHAT, body | {"stream": True})
        assert client.read_head().status_code == 200
        parts = [part["choices"][0] for part in sse_events(client.chunks()) if part != "[DONE]"]
    assert [part["structured_output"] for part in parts if part["finish_reason"]] == [told, told]
    assert not any("structured_output" in part for part in parts if not part["finish_reason"])


def test_completions_tell_it_as_well_and_a_schema_that_is_enforced_whole_tells_nothing(server: Server) -> None:
    form = json_schema({**of_pair("a", "a"), "additionalProperties": False})
    fields = {"prompt": "Hi", "max_tokens": 100, "response_format": form}
    assert server.post(COMPLETIONS, fields).json()["choices"][0]["structured_output"] == INVALID
    whole = server.post(CHAT, {**asked(of_pair("a", "b")), "response_format": json_schema({"type": "null"})})
    assert "structured_output" not in whole.json()["choices"][0]


def test_a_json_object_with_a_schema_is_checked(server: Server) -> None:
    form = {"type": "json_object", "schema": {**of_pair("a", "a"), "additionalProperties": False}}
    assert server.post(CHAT, asked({}, response_format=form)).json()["choices"][0]["structured_output"] == INVALID


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": of_pair("a", "a")}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


def test_calls_tell_which_of_them_was_checked(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 200, "tools": TOOLS}
    named = {"type": "function", "function": {"name": "f"}}
    choice = server.post(CHAT, body | {"tool_choice": named}).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"tags": ["a", "a"]}
    assert choice["structured_output"] == {"valid": False, "tool_calls": [{"index": 0, "name": "f", **INVALID}]}
    other = {"type": "function", "function": {"name": "g"}}
    choice = server.post(CHAT, body | {"tool_choice": other}).json()["choices"][0]
    assert "structured_output" not in choice


def test_responses_tell_it_and_their_sdk_reads_them(server: Server, sdk: openai.OpenAI) -> None:
    schema = {**of_pair("a", "a"), "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "tags", "schema": schema}}
    response = sdk.responses.create(model=MODEL, input="Hi", text=form, max_output_tokens=100)
    assert json.loads(response.output_text) == {"tags": ["a", "a"]}
    assert response.model_extra is not None
    assert response.model_extra["structured_output"] == INVALID
    kept = sdk.responses.retrieve(response.id)
    assert (kept.model_extra or {})["structured_output"] == INVALID
    tool: Any = {"type": "function", "name": "f", "parameters": of_pair("a", "b"), "strict": False}
    choice: Any = {"type": "function", "name": "f"}
    with sdk.responses.stream(model=MODEL, input="Hi", tools=[tool], tool_choice=choice) as stream:
        final = stream.get_final_response()
    told = (final.model_extra or {})["structured_output"]
    assert told["valid"] is True
    assert {call["name"] for call in told["tool_calls"]} == {"f"}


def test_messages_tell_it_and_their_sdk_reads_them(server: Server) -> None:
    schema = {**of_pair("a", "a"), "additionalProperties": False}
    asking: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": HELLO}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        message = client.messages.create(**asking, output_config=config)
        assert (message.model_extra or {})["structured_output"] == INVALID
        tool: Any = {"name": "f", "input_schema": of_pair("a", "b")}
        choice: Any = {"type": "tool", "name": "f"}
        with client.messages.stream(**asking, tools=[tool], tool_choice=choice) as stream:
            events = list(stream)
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert (delta.model_extra or {})["structured_output"]["valid"] is True


@pytest.mark.parametrize(
    ("path", "fields", "param", "advice"),
    [
        (CHAT, {"response_format": json_schema(of_pair("a", "b"), strict=True)}, "response_format", ". Without strict"),
        (CHAT, {"guided_json": of_pair("a", "b")}, "guided_json", "In response_format without strict"),
        (CHAT, {"structured_outputs": {"json": of_pair("a", "b")}}, "structured_outputs", "In response_format without"),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}],
                "tool_choice": "required",
            },
            "tools",
            "Without strict",
        ),
        (CHAT, {"response_format": json_schema({"properties": {"a": {"type": "strin"}}})}, "response_format", ""),
        (CHAT, {"response_format": json_schema({"properties": []})}, "response_format", ""),
    ],
)
def test_what_promises_to_be_enforced_whole_is_refused_with_advice(
    server: Server, path: str, fields: dict, param: str, advice: str
) -> None:
    answer = server.post(path, {"messages": HELLO, "max_tokens": 5} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert advice in error["message"]
    assert ("uniqueItems" in error["message"]) == bool(advice)
    assert bool(advice) or "ithout strict" not in error["message"]


def test_outcomes_are_counted(server: Server) -> None:
    def count(outcome: str) -> float:
        return server.metrics().samples[f"headrace:structured_output_checks_total{{outcome={outcome}}}"]

    before = count("valid"), count("invalid")
    server.post(CHAT, asked(of_pair("a", "b")))
    server.post(CHAT, asked(of_pair("a", "a"), n=2))
    assert (count("valid"), count("invalid")) == (before[0] + 1, before[1] + 2)


def test_a_check_that_would_take_for_ever_ends_soon_and_delays_nobody(server: Server) -> None:
    """To say why this does not fit takes twice as long with each of its levels."""
    again = {"properties": {"a": {"$ref": "#/$defs/s"}}}
    node = {"anyOf": [{**again, "required": ["a"]}, {**again, "minProperties": 0}], "not": {"required": ["z"]}}
    value: Any = {"z": 1}
    for _ in range(40):
        value = {"a": value}
    schema = {"$defs": {"s": node}, "allOf": [{"$ref": "#/$defs/s"}], "const": value}
    fields = {"messages": HELLO, "max_tokens": 400, "response_format": json_schema(schema)}
    answer = server.post(CHAT, fields)
    assert answer.status_code == 200, answer.text
    told = answer.json()["choices"][0]
    assert (told["finish_reason"], told["structured_output"]["valid"]) == ("stop", False)
    assert told["structured_output"]["errors"] == []
    assert server.post(CHAT, asked(of_pair("a", "a"))).json()["choices"][0]["structured_output"] == INVALID
