"""Keywords of a schema without `strict` that no grammar enforces are left out, and a header names them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.harness import MODEL, Server

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


HEADER = "x-headrace-warning"
WARNING = "schema keywords without effect: uniqueItems (no grammar enforces them)"


def asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {**schema, "additionalProperties": False}
    return {"messages": HELLO, "max_tokens": 100, "response_format": json_schema(closed), **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, asked(of_pair("a", "a"), n=2)),
        (CHAT, asked({}, response_format={"type": "json_object", "schema": of_pair("a", "a")})),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 100, "response_format": json_schema(of_pair("a", "a"))}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_header_names_the_keywords_and_the_others_are_enforced(
    server: Server, path: str, body: dict, stream: bool
) -> None:
    answer = server.post(path, body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == WARNING
    if not stream:
        for choice in answer.json()["choices"]:
            assert "structured_output" not in choice
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert json.loads(text)["tags"] == ["a", "a"]


def test_the_header_names_fields_and_keywords_together(server: Server) -> None:
    answer = server.post(CHAT, asked(of_pair("a", "b"), verbosity="low"))
    assert answer.headers[HEADER] == f"fields without effect: verbosity (this server does not use them); {WARNING}"


def test_a_schema_that_is_enforced_whole_has_no_warning(server: Server) -> None:
    for schema in ({"type": "null"}, UNION):
        answer = server.post(CHAT, {**asked({}), "response_format": json_schema(schema)})
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers


def kind(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}},
        "required": ["kind"],
        "additionalProperties": False,
    }


UNION = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b")}}
OVERLAP = {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}


def test_a_one_of_is_an_any_of_with_a_warning_unless_its_branches_exclude_each_other(server: Server) -> None:
    for schema in (UNION, OVERLAP):
        strict = {**asked({}), "response_format": json_schema(schema, strict=True)}
        assert server.post(CHAT, strict).status_code == (200 if schema is UNION else 400)
    refusal = server.post(CHAT, strict).json()["error"]
    assert "oneOf" in refusal["message"]
    answer = server.post(CHAT, {**asked({}), "response_format": json_schema(OVERLAP)})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("a", "b", "c")
    assert answer.headers[HEADER] == WARNING.replace("uniqueItems", "oneOf")


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": of_pair("a", "a")}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.mark.slow
def test_calls_have_the_warning_of_their_function(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 200, "tools": TOOLS}
    answer = server.post(CHAT, body | {"tool_choice": {"type": "function", "function": {"name": "f"}}})
    call = answer.json()["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"tags": ["a", "a"]}
    assert answer.headers[HEADER] == WARNING
    answer = server.post(CHAT, body | {"tool_choice": {"type": "function", "function": {"name": "g"}}})
    assert HEADER not in answer.headers


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
def test_responses_have_the_header(server: Server, more: dict) -> None:
    schema = {**of_pair("a", "a"), "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "tags", "schema": schema}}
    answer = server.post(RESPONSES, {"input": "Hi", "text": form, "max_output_tokens": 100, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == WARNING


def test_messages_have_the_header(server: Server) -> None:
    schema = {**of_pair("a", "a"), "additionalProperties": False}
    asking = {"model": MODEL, "max_tokens": 100, "messages": HELLO}
    config = {"format": {"type": "json_schema", "schema": schema}}
    tool = {"name": "f", "input_schema": of_pair("a", "b")}
    for fields in ({"output_config": config}, {"tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}):
        answer = server.post(MESSAGES, {**asking, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == WARNING


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
