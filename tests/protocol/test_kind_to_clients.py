"""What clients send that is no text, or not quite as it is described: taken where the model can do without it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.errors import InvalidRequest
from protocol.anthropic.blocks import MAX_BLOCKS_IN_ALL
from protocol.anthropic.messages import MessagesRequest
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.openai.chat import ChatCompletionRequest
from protocol.openapi import document
from protocol.request_fields import RequestFields
from protocol.responses.request import ResponsesRequest
from protocol.tools.unsupported import IgnoredParts

USER = {"role": "user", "content": "Hello"}
TEXT = {"type": "text", "text": "Seen."}
NO_IMAGE = "[image left out: this model reads text only]"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa=="}}
NOTES = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
PAGES = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
FOUND = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [TEXT]}


def parsed(model: type[RequestFields], body: dict[str, Any]) -> Any:
    return parse_body(model, orjson.dumps(body))


def told(request: Any) -> str:
    """The last message as the model reads it."""
    return str(request.translate().messages_for_template()[-1]["content"])


def anthropic(turn: dict[str, Any], **more: Any) -> Any:
    return parsed(MessagesRequest, {"messages": [USER, turn], "max_tokens": 5, **more})


def result(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(content)}]}


def test_messages_leave_out_what_is_no_text_in_a_tools_result() -> None:
    request = anthropic(result(TEXT, IMAGE, PDF, {"type": "browser_state"}))
    no_document, no_part = (NO_IMAGE.replace("image", word) for word in ("document", "part"))
    assert told(request) == f"Seen.\n{NO_IMAGE}\n{no_document}\n{no_part}"
    assert request.left_out == IgnoredParts(items=("image", "document", "browser_state"))


def test_responses_leave_out_what_is_no_text_in_a_tools_output() -> None:
    parts = [{"type": "input_text", "text": "Seen."}, {"type": "input_image", "image_url": "data:"}]
    for kind in ("function_call_output", "custom_tool_call_output"):
        item = {"type": kind, "call_id": "c", "output": [*parts, {"type": "input_file", "file_id": "f"}]}
        request = parsed(ResponsesRequest, {"input": [USER, item]})
        assert told(request) == f"Seen.\n{NO_IMAGE}\n{NO_IMAGE.replace('image', 'file')}"
        assert request.left_out == IgnoredParts(items=("input_image", "input_file"))
        [_, kept] = request.items()
        assert NO_IMAGE in kept.listed()["output"]  # a response that continues this one finds it


def test_chat_leaves_out_what_is_no_text_in_a_tools_message() -> None:
    parts = [TEXT, {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "file", "file": {}}]
    message = {"role": "tool", "tool_call_id": "c", "content": parts}
    request = parsed(ChatCompletionRequest, {"messages": [USER, message]})
    assert told(request) == f"Seen.\n{NO_IMAGE}\n{NO_IMAGE.replace('image', 'file')}"
    assert request.left_out == IgnoredParts(items=("image_url", "file"))


@pytest.mark.parametrize(
    ("model", "content", "param"),
    [
        (ChatCompletionRequest, [TEXT, {"type": "image_url"}], "messages.0.content.1.type"),
        (MessagesRequest, [TEXT, IMAGE], "messages.0.content.1.type"),
        (MessagesRequest, [PDF], "messages.0.content.0.source.type"),
        (MessagesRequest, [{**PAGES, "source": {"type": "content", "content": [IMAGE]}}], None),
        (ResponsesRequest, [{"type": "input_image"}], "input.0.content.0.type"),
    ],
)
def test_what_the_user_sends_is_refused_by_name(
    model: type[RequestFields], content: list[Any], param: str | None
) -> None:
    turns = [{"role": "user", "content": content}]
    body = {"input": turns} if model is ResponsesRequest else {"messages": turns, "max_tokens": 5}
    with pytest.raises(ApiError, match="not supported by this server") as caught:
        parsed(model, body)
    assert caught.value.status == 400
    assert param is None or caught.value.param == param


def test_documents_and_search_results_of_text_reach_the_model() -> None:
    text = "Notes\none\ntwo\nA\nhttps://a.example\nSeen."
    for turn in ({"role": "user", "content": [NOTES, PAGES, FOUND]}, result(NOTES, PAGES, FOUND)):
        request = anthropic(turn)
        assert told(request).endswith(text)
        assert request.left_out == IgnoredParts()
    with pytest.raises(ApiError, match="only for role user"):
        anthropic({"role": "assistant", "content": [NOTES]})


def test_blocks_are_bounded_however_deep_they_are() -> None:
    pages = {"type": "document", "source": {"type": "content", "content": [TEXT] * 4000}}
    with pytest.raises(ApiError, match=f"at most {MAX_BLOCKS_IN_ALL} blocks in all"):
        anthropic(result(*[pages] * 5))
    with pytest.raises(ApiError, match=f"at most {MAX_BLOCKS_IN_ALL} blocks in all"):
        anthropic(result(*[{**FOUND, "content": [TEXT] * 4000}] * 5))


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_a_tool_may_answer_nothing(content: dict[str, Any]) -> None:
    request = parsed(ChatCompletionRequest, {"messages": [USER, {"role": "tool", "tool_call_id": "c", **content}]})
    assert told(request) == ""


def test_a_refusal_in_chat_is_text() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert told(parsed(ChatCompletionRequest, {"messages": [USER, refused]})) == "No."


def test_arguments_of_earlier_calls_may_be_an_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    request = parsed(ChatCompletionRequest, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    assert request.messages_for_template()[-1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    for wrong in (1, [1], True):
        call["function"] = {"name": "f", "arguments": wrong}
        with pytest.raises(ApiError, match="arguments must be a string"):
            parsed(ChatCompletionRequest, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})


def test_any_means_required() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = parsed(ChatCompletionRequest, {"messages": [USER], "tools": [tool], "tool_choice": "any"})
    assert request.tool_use.choice == "required"


def test_responses_take_what_has_no_effect_here() -> None:
    request = parsed(
        ResponsesRequest,
        {
            "input": "Hello",
            "context_management": [{"type": "compaction", "compact_threshold": 1000}],
            "moderation": {"model": "omni"},
            "reasoning": {"effort": "low", "summary": "none", "context": "auto", "mode": "pro", "of_tomorrow": [1]},
        },
    )
    assert request.echo()["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize("container", ["container_1", {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}])
def test_a_container_is_left_out(container: Any) -> None:
    assert anthropic(USER, container=container).left_out == IgnoredParts(items=("container",))


@pytest.mark.parametrize("before", [[], [{"type": "text", "text": "I look."}]])
def test_calls_without_results_are_refused_in_anthropics_words(before: list[Any]) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    request = anthropic({"role": "assistant", "content": [*before, call]})
    with pytest.raises(InvalidRequest) as caught:
        request.translate()
    assert str(caught.value) == (
        "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_1. Each "
        "`tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def test_the_description_has_the_queries() -> None:
    paths = document("1")["paths"]

    def fields(path: str) -> set[str]:
        return {each["name"] for each in paths[path]["get"]["parameters"] if each["in"] == "query"}

    assert fields("/v1/responses/{id}") == {"stream", "starting_after", "include"}
    assert fields("/v1/models") == {"limit", "after_id", "before_id"}
