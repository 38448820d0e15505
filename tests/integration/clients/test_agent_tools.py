"""What coding agents offer beside functions, through the official SDKs and on the wire."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.harness import MODEL, TIMEOUT, Server

QUESTION: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0}
WARNING = "x-headrace-warning"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 1}),
        ("/v1/messages?beta=true", {"messages": QUESTION, "max_tokens": 1}),
    ],
)
def test_tools_that_nobody_serves_are_left_out_and_told(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    counted = "headrace:tools_left_out_total{type=web_search}"
    before = server.metrics().samples[counted]
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "a\nb: c"}]
    answer = server.post(path, {**SHORT, **body, "tools": tools, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING] == "tools left out: web_search_20250305, other (this server does not support them)"
    assert server.metrics().samples[counted] == before + 1
    without = server.post(path, {**SHORT, **body, "tools": [], "stream": stream})
    assert without.status_code == 200
    assert WARNING not in without.headers


# --- custom tools

LARK = {"syntax": "lark", "definition": 'start: "*** Begin Patch" /[a-z\\n]+/'}
REGEX = {"syntax": "regex", "definition": r'[ab]{2}\n"x[0-9]"'}
MATCHES = re.compile(REGEX["definition"])
NAMED: Any = {"type": "custom", "custom": {"name": "apply_patch"}}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def custom(grammar: dict[str, str] | None = None) -> Any:
    form = {} if grammar is None else {"format": {"type": "grammar", "grammar": grammar}}
    return {"type": "custom", "custom": {"name": "apply_patch", "description": "Patches files.", **form}}


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_custom_tools_text_follows_its_grammar(sdk: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [custom(REGEX)],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 96,
        "parallel_tool_calls": False,
    }
    whole = sdk.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == ("stop" if choice is NAMED else "tool_calls")
    [call] = whole.message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "apply_patch"
    assert MATCHES.fullmatch(call.custom.input), call.custom.input
    deltas = [chunk.choices[0].delta for chunk in sdk.chat.completions.create(**fields, stream=True)]
    streamed = [each.model_dump()["tool_calls"][0] for each in deltas if each.tool_calls]
    assert streamed[0]["type"] == "custom"
    assert streamed[0]["custom"] == {"name": "apply_patch", "input": ""}
    assert len(streamed) > 3
    assert "".join(each["custom"]["input"] for each in streamed) == call.custom.input


def test_a_custom_tool_may_take_any_text_and_its_call_goes_back_to_the_model(sdk: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": [custom()], "temperature": 0, "max_tokens": 48}
    message = sdk.chat.completions.create(**fields, messages=QUESTION, tool_choice=NAMED).choices[0].message
    [call] = message.tool_calls or []
    assert call.type == "custom"
    result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
    messages: Any = [*QUESTION, message, result]
    answer = sdk.chat.completions.create(**fields, messages=messages).choices[0].message
    assert answer.content or answer.tool_calls


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_lark_grammar_is_refused_where_a_call_is_demanded_and_shown_with_a_warning_elsewhere(
    server: Server, choice: Any
) -> None:
    body = {**SHORT, "messages": QUESTION, "max_tokens": 1, "tools": [custom(LARK)]}
    answer = server.post("/v1/chat/completions", {**body, "tool_choice": choice})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "tools"
    assert "'apply_patch' with a Lark grammar, which is not enforced" in error["message"]
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    warning = "grammars without effect: apply_patch (Lark in a tool's call is not enforced)"
    assert answer.headers[WARNING] == warning
    flat = {**FLAT, "format": {"type": "grammar", **LARK}}
    answer = server.post("/v1/responses", {**ASK, "tools": [flat], "max_output_tokens": 1})
    assert answer.headers[WARNING] == warning
    forced = {**ASK, "tools": [flat], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert server.post("/v1/responses", forced).status_code == 400


def test_a_pattern_that_cannot_be_escaped_is_refused_where_a_call_is_demanded(server: Server) -> None:
    tool = custom({"syntax": "regex", "definition": "[[a]b]"})
    body = {**SHORT, "messages": QUESTION, "max_tokens": 1, "tools": [tool], "tool_choice": NAMED}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools"
    assert "[[a] in a regular expression cannot be enforced within a JSON string" in error["message"]


# --- functions, the old form of tools


def test_old_clients_get_their_function_call(sdk: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "functions": [{"name": "get_weather", "parameters": parameters}],
        "temperature": 0,
        "max_tokens": 48,
    }
    choice = sdk.chat.completions.create(**fields, function_call={"name": "get_weather"}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    call = choice.message.function_call
    assert call is not None
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    chunks = list(sdk.chat.completions.create(**fields, function_call={"name": "get_weather"}, stream=True))
    told = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert told[0].name == "get_weather"
    assert "".join(each.arguments or "" for each in told) == call.arguments
    messages = [*QUESTION, choice.message, {"role": "function", "name": "get_weather", "content": "21 degrees"}]
    assert sdk.chat.completions.create(**{**fields, "messages": messages}).choices[0].finish_reason


def test_a_function_that_the_model_was_free_to_call_is_how_the_answer_ends(server: Server) -> None:
    call = r'<tool_call>\n\{"name": "f", "arguments": \{\}\}\n</tool_call>'
    body = {**SHORT, "messages": QUESTION, "functions": [{"name": "f"}], "structured_outputs": {"regex": call}}
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]


# --- the same in Responses, and what else it has

FLAT: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", **REGEX},
}
ASK: dict[str, Any] = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 96}
ONE: dict[str, Any] = {"parallel_tool_calls": False}


def streamed(sdk: openai.OpenAI, **fields: Any) -> tuple[list[Any], Any]:
    """The events between the start and the end of the one item, and the item."""
    events: list[Any] = list(sdk.responses.create(**ASK, **ONE, **fields, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [item] = events[-1].response.output
    assert events[2].type == "response.output_item.added"
    assert events[-2].type == "response.output_item.done"
    assert events[2].item.id == events[-2].item.id == item.id
    assert events[-2].item == item
    return events[3:-2], item


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
    ],
    ids=["named", "allowed"],
)
def test_a_custom_call_streams_as_an_item_of_its_own(sdk: openai.OpenAI, choice: Any) -> None:
    events, item = streamed(sdk, tools=[FLAT], tool_choice=choice)
    assert item.type == "custom_tool_call"
    assert item.id.startswith("ctc_")
    assert MATCHES.fullmatch(item.input), item.input
    *deltas, done = events
    assert {event.type for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert "".join(event.delta for event in deltas) == done.input == item.input
    assert done.type == "response.custom_tool_call_input.done"
    assert {event.item_id for event in events} == {item.id}
    whole: Any = sdk.responses.create(**ASK, **ONE, tools=[FLAT], tool_choice=choice)
    [call] = whole.output
    assert (call.type, call.input) == ("custom_tool_call", item.input)
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    more: Any = sdk.responses.create(**{**ASK, "input": [output]}, tools=[FLAT], previous_response_id=whole.id)
    assert more.output
    listed = sdk.responses.input_items.list(more.id, order="asc").data
    assert [each.type for each in listed] == ["message", "custom_tool_call", "custom_tool_call_output"]


def test_shells_and_patches_come_back_as_items_of_their_own(sdk: openai.OpenAI) -> None:
    events, item = streamed(sdk, tools=[{"type": "local_shell"}], tool_choice={"type": "local_shell"})
    assert (events, item.type, item.action.type) == ([], "local_shell_call", "exec")
    assert all(isinstance(word, str) for word in item.action.command)
    events, item = streamed(sdk, tools=[{"type": "apply_patch"}], tool_choice={"type": "apply_patch"})
    assert (events, item.type) == ([], "apply_patch_call")
    assert item.operation.type in ("create_file", "update_file", "delete_file")
    shell: Any = {"type": "shell", "environment": {"type": "local"}}
    events, item = streamed(sdk, tools=[shell], tool_choice={"type": "shell"})
    assert item.type == "shell_call"
    done = [event.command for event in events if event.type == "response.shell_call_command.done"]
    assert done == item.action.commands


def test_a_tool_of_a_namespace_comes_back_in_it(sdk: openai.OpenAI) -> None:
    inner = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}, "strict": False}
    space: Any = {"type": "namespace", "name": "mcp__docs", "description": "Documents.", "tools": [inner]}
    _, item = streamed(sdk, tools=[space], tool_choice={"type": "function", "name": "find"})
    assert (item.type, item.namespace, item.name) == ("function_call", "mcp__docs", "find")


def test_what_codex_sends_goes_through(server: Server) -> None:
    listing = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    history: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "custom_tool_call",
            "call_id": "c1",
            "name": "apply_patch",
            "input": "*** Begin",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Success."},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c2", "output": "README.md"},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed"},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["ls", "pwd"]}},
        {"type": "shell_call_output", "call_id": "c4", "output": [listing]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    look = {"type": "function", "name": "view_image", "parameters": {"type": "object"}, "strict": False}
    tools = [look, FLAT, {"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    body = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": history,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {},
    }
    answer = server.post("/v1/responses", {**body, "max_output_tokens": 8, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING] == (
        "tools left out: web_search, image_generation; items left out: web_search_call"
        " (this server does not support them)"
    )
    assert "event: response.incomplete" in answer.text or "event: response.completed" in answer.text


# --- Anthropic's tools that the client runs


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "bash_20250124", "name": "bash"}, None),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100}, "command"),
        ({"type": "text_editor_20250124", "name": "str_replace_editor"}, "path"),
        ({"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}}, "command"),
    ],
    ids=str,
)
def test_tools_of_a_fixed_form_are_called_by_their_names(server: Server, tool: Any, field: str | None) -> None:
    with (
        anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0, timeout=TIMEOUT) as client,
        client.messages.stream(  # a stream announces a call before it may be cut off
            model=MODEL,
            max_tokens=96,
            messages=QUESTION,
            tools=[tool],
            tool_choice={"type": "tool", "name": tool["name"], "disable_parallel_tool_use": True},
            extra_body={"temperature": 0},
        ) as stream,
    ):
        message = stream.get_final_message()
    [block] = message.content
    assert block.type == "tool_use"
    assert block.name == tool["name"]
    assert isinstance(block.input, dict)
    assert field is None or field in block.input


# --- what the chat template does not read


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 1}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 1}),
        ("/tokenize", {"messages": QUESTION}),
        ("/v1/messages/count_tokens", {"messages": QUESTION}),
        ("/v1/responses/input_tokens", {"input": QUESTION}),
    ],
)
def test_what_the_template_does_not_read_is_told(server: Server, path: str, body: dict[str, Any]) -> None:
    unread = {"documents": [{"text": "a"}], "chat_template_kwargs": {"enable_thinking": False}}
    answer = server.post(path, {**body, **unread})
    assert answer.status_code == 200, answer.text
    told = "documents, chat_template_kwargs.enable_thinking (the chat template does not read them)"
    assert answer.headers[WARNING] == f"fields without effect: {told}"
    assert WARNING not in server.post(path, body).headers
