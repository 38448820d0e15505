"""Requests that /v1/responses refuses, each with a 400 that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import MODEL, Server

GOOD: dict[str, Any] = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}


# Each: fields beside a good request's, the param that the error names, and words of its message.
def text_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, **more}}}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "at least one"),
    ({"input": 5}, "input", "a string or an array"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "robot"),
    ({"input": [{"role": "user"}]}, "input.0.content", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_image"),
    ({"input": [{"type": "computer"}]}, "input.0.type", "computer"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input.0.call_id", "required"),
    ({"input": "word " * 5000}, "input", "maximum context length"),
    ({"max_tool_calls": -1}, "max_tool_calls", "at least 0"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1, or -1"),
    ({"temperature": 3}, "temperature", "[0.0, 2.0]"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be in"),
    ({"truncation": "auto", "input": "word " * 5000}, "input", "maximum context length"),
    ({"truncation": "some"}, "truncation", "some"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"tools": [{"type": "file_search"}], "tool_choice": "required"}, "tool_choice", "but got file_search"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
    ({"tool_choice": {"type": "namespace", "name": "none"}}, "tool_choice.type", "namespace"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    (text_format({"type": "string", "pattern": "("}, strict=True), "text.format", "text.format"),
    (text_format({"type": "strin"}), "text.format", "text.format"),
    ({"max_tokens": 5}, "max_tokens", "not supported"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "not supported"),
    ({"stop": ["a"] * 17}, "stop", "16"),
    ({"metadata": {"a": 1}}, "metadata.a", "a string"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
    ({"reasoning": {"effort": "lots"}}, "reasoning.effort", "lots"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "no response 'resp_x' is kept"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_request_names_the_field(server: Server, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = server.post("/v1/responses", {**GOOD, "stream": True, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_query_that_cannot_be_honoured_is_refused(server: Server) -> None:
    kept = server.post("/v1/responses", {**GOOD, "max_output_tokens": 1}).json()["id"]
    for path, param, given in [
        ("?stream=true", "stream", "true"),
        ("/input_items?limit=0", "limit", "'0'"),
        ("/input_items?limit=x", "limit", "'x'"),
        ("/input_items?order=up", "order", "'up'"),
        ("/input_items?after=msg_x", "after", "'msg_x'"),
    ]:
        answer = server.client.get(f"/v1/responses/{kept}{path}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert given in answer.json()["error"]["message"]
