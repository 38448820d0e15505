"""Tools that the server does not support are left out of the request instead of failing it, in every dialect."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.errors import InvalidRequest
from protocol.anthropic.messages import MessagesRequest
from protocol.body import parse_body
from protocol.errors import ApiError, to_api_error
from protocol.openai.chat import ChatCompletionRequest
from protocol.request_fields import RequestFields
from protocol.responses.request import ResponsesRequest
from protocol.tools.unsupported import FAMILIES, MAX_NAMED, IgnoredParts, family

USER = {"role": "user", "content": "Hello"}
HOSTED = [{"type": "web_search", "name": "web_search"}, {"type": "image_generation"}, {"type": "of_tomorrow", "a": [1]}]
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
MESSAGES: dict[str, Any] = {"messages": [USER], "max_tokens": 5}


def parsed(model: type[RequestFields], body: dict[str, Any]) -> Any:
    return parse_body(model, orjson.dumps(body))


@pytest.mark.parametrize(
    ("model", "body", "served"),
    [
        (ChatCompletionRequest, {"messages": [USER]}, {"type": "function", "function": {"name": "look"}}),
        (ResponsesRequest, {"input": "Hello"}, FUNCTION),
        (MessagesRequest, MESSAGES, {"name": "look", "input_schema": {"type": "object"}}),
    ],
)
def test_the_model_is_told_of_the_others_alone(
    model: type[RequestFields], body: dict[str, Any], served: dict[str, Any]
) -> None:
    request = parsed(model, {**body, "tools": [*HOSTED[:1], served, *HOSTED[1:]]})
    assert request.left_out.tools == ("web_search", "image_generation", "of_tomorrow")
    tool_use = request.translate().tool_use
    assert [function.name for function in tool_use.functions] == ["look"]
    assert parsed(model, {**body, "tools": HOSTED}).translate().tool_use is None
    assert parsed(model, {**body, "tools": []}).translate().tool_use is None


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (MessagesRequest, {**MESSAGES, "tool_choice": {"type": "tool", "name": "web_search"}}),
        (MessagesRequest, {**MESSAGES, "tool_choice": {"type": "any"}}),
        (ResponsesRequest, {"input": "a", "tool_choice": {"type": "web_search"}}),
        (ResponsesRequest, {"input": "a", "tool_choice": "required"}),
        (
            ResponsesRequest,
            {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": HOSTED[:1]}},
        ),
        (ChatCompletionRequest, {"messages": [USER], "tool_choice": "required"}),
    ],
)
def test_what_is_left_out_cannot_be_demanded(model: type[RequestFields], body: dict[str, Any]) -> None:
    def make() -> None:
        parsed(model, {**body, "tools": HOSTED}).translate()

    with pytest.raises((ApiError, InvalidRequest), match="web_search") as caught:
        make()
    assert to_api_error(caught.value).status == 400


def test_a_tool_that_is_allowed_and_left_out_is_no_tool() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED[0], {"type": "function", "name": "look"}]}
    request = parsed(ResponsesRequest, {"input": "a", "tools": [*HOSTED, FUNCTION], "tool_choice": choice})
    assert [function.name for function in request.translate().tool_use.functions] == ["look"]


def test_what_is_left_of_their_calls_does_not_fail_a_conversation() -> None:
    items = [USER, {"type": "web_search_call", "id": "ws_1"}, {"type": "of_tomorrow_call"}, {"type": "compaction"}]
    request = parsed(ResponsesRequest, {"input": items})
    assert request.left_out.items == ("web_search_call", "of_tomorrow_call", "compaction")
    assert [item.role for item in request.items()] == ["user"]
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    turns = [USER, {"role": "assistant", "content": [use, result, {"type": "text", "text": "Found."}]}, USER]
    messages = parsed(MessagesRequest, {**MESSAGES, "messages": turns})
    assert messages.left_out.items == ("server_tool_use", "web_search_tool_result")
    assert [message["content"] for message in messages.translate().messages_for_template()] == [
        "Hello",
        "Found.",
        "Hello",
    ]
    paused = parsed(MessagesRequest, {**MESSAGES, "messages": [USER, {"role": "assistant", "content": [use]}]})
    assert paused.translate().continue_final_message is False


def test_a_client_that_searches_its_own_tools_names_what_it_found() -> None:
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    [message] = (
        parsed(MessagesRequest, {**MESSAGES, "messages": [{"role": "user", "content": [found]}]}).translate().messages
    )
    assert message.role == "tool"
    assert "look" in message.text()


def test_the_warning_is_short_and_holds_nothing_that_a_client_made_up() -> None:
    assert IgnoredParts().warning() is None
    told = IgnoredParts(("web_search", "a\r\nset-cookie: b", "ü", "x" * 65), ("mcp_call",)).warning()
    assert told == "tools left out: web_search, other; items left out: mcp_call (this server does not support them)"
    many = IgnoredParts(tuple(f"{'t' * 60}{number}" for number in range(1000))).warning()
    assert many is not None
    assert many.count(",") == MAX_NAMED
    assert len(many) < 2000


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("web_search_20250305", "web_search"),
        ("web_search_2025_08_26", "web_search"),
        ("web_search_preview_2025_03_11", "web_search_preview"),
        ("tool_search_tool_bm25_20251119", "tool_search_tool_bm25"),
        ("mcp", "mcp"),
        ("made_up", "other"),
        ("", "other"),
    ],
)
def test_types_are_counted_by_families(kind: str, label: str) -> None:
    assert family(kind) == label
    assert label in FAMILIES


def test_tools_that_the_conversation_brings_are_tools() -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    brought = {"type": "additional_tools", "role": "developer", "tools": [function, {"type": "web_search"}]}
    body = {"input": [brought, {"role": "user", "content": "Hello"}]}
    request = ResponsesRequest.model_validate(body)
    assert request.left_out == IgnoredParts(tools=("web_search",))
    tool_use = request.translate().tool_use
    assert tool_use is not None
    assert [function.name for function in tool_use.functions] == ["f"]
