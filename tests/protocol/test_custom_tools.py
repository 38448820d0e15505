"""Custom tools: what the model is told, and how their text comes out of the JSON in which it is written."""

from __future__ import annotations

import json
from typing import Any, Literal

import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.messages import StructuredOutput
from engine.structured.grammar import to_llguidance
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.output import delta, message_fields
from protocol.syntax.call_reader import InputText
from protocol.syntax.message_parts import (
    ContentDelta,
    MessagePart,
    ToolCallArguments,
    ToolCallInput,
    ToolCallStart,
    join,
)
from protocol.syntax.record import Reading, new_openai_id
from protocol.syntax.registry import SYNTAXES
from protocol.tools.kinds import CustomTool, Function, ToolUse, partial_object

USER = {"role": "user", "content": "Hello"}


def read(arguments: str, size: int) -> tuple[str, str]:
    """What came while the arguments did, in pieces of this size, and what came with their end."""
    reader = InputText()
    live = "".join(reader.feed(arguments[start : start + size]) for start in range(0, len(arguments), size))
    return live, reader.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("text", ['a"b\\n\n\t', "", "é😀x", "\x00\x1b", "{}[]"])
@pytest.mark.parametrize("form", ['{"input": %s}', '{ "input":%s , "b": 1}', ' {\n"input" :\n%s\n}'])
def test_text_is_passed_on_while_it_is_written(text: str, form: str, size: int) -> None:
    for is_ascii in (True, False):
        assert read(form % json.dumps(text, ensure_ascii=is_ascii), size) == (text, "")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x\\ny"}', "x\ny"),  # another name for the one argument
        ('{"a": 1, "input": "z"}', "z"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ('{"inp', '{"inp'),
        ('{"input": "ab\\', "ab"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\udc00x"}', "\ufffdx"),
        ('{"input": "\\ud83dab\\ud83d\\n"}', "\ufffdab\ufffd\n"),
    ],
)
def test_other_forms_and_halves_lose_nothing(arguments: str, text: str, size: int) -> None:
    assert "".join(read(arguments, size)) == text


@pytest.mark.parametrize("family", SYNTAXES)
def test_every_family_gives_custom_calls_as_such(family: str) -> None:
    tool_format = SYNTAXES[family]
    tools = ToolUse(functions=(CustomTool(name="patch"),))
    reading = Reading(tools=tools, new_call_id=new_openai_id, prompt_end="<|start|>assistant")
    tag = tool_format.tag("patch", True)
    text = f'{tag.begin}{{"input": "a\\nb"}}{tag.end}'
    for size in (1, 4, len(text)):
        reader = tool_format.reader(reading)()
        parts: list[MessagePart] = []
        for start in range(0, len(text), size):
            parts += reader.feed_text(text[start : start + size])
        [start_of_call, given] = join([*parts, *reader.finish_text()])
        assert isinstance(start_of_call, ToolCallStart)
        assert start_of_call.is_custom
        assert given == ToolCallInput(0, "a\nb")


def test_calls_are_told_in_chats_words() -> None:
    parts: list[MessagePart] = [
        ToolCallStart(0, "c0", "patch", is_custom=True),
        ToolCallInput(0, "a"),
        ToolCallInput(0, "b"),
        ToolCallStart(1, "c1", "look"),
        ToolCallArguments(1, "{}"),
    ]
    custom = {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": "ab"}}
    function = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert message_fields(parts)["tool_calls"] == [custom, function]
    begun = {"index": 0, "id": "c0", "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert delta(parts[0]) == {"tool_calls": [begun]}
    assert delta(parts[1]) == {"tool_calls": [{"index": 0, "custom": {"input": "a"}}]}
    assert delta(ContentDelta("x")) == {"content": "x"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, orjson.dumps({"messages": [USER], **fields}))


def test_the_model_is_told_of_a_function_with_one_text() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ab*"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": grammar}}
    use = chat(tools=[tool], tool_choice={"type": "custom", "custom": {"name": "patch"}}).tool_use
    assert use is not None
    assert (use.named, use.choice) == ("patch", "required")
    told = use.functions[0].for_template()["function"]
    assert told["name"] == "patch"
    assert told["description"].startswith("Patches.")
    assert "ab*" in told["description"]
    assert list(told["parameters"]["properties"]) == ["input"]


def test_a_custom_call_of_an_earlier_turn_is_told_as_the_model_wrote_it() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [_, message] = chat(messages=messages).messages_for_template()
    function = {"name": "patch", "arguments": {"input": "a\nb"}}
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]


def test_some_of_the_tools_may_be_allowed() -> None:
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "function", "function": {"name": "g"}},
    ]
    allowed = [
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "function", "function": {"name": "g"}},
        {"type": "mcp"},
    ]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    use = chat(tools=tools, tool_choice=choice).tool_use
    assert use is not None
    assert [function.name for function in use.functions] == ["c", "g"]
    assert (use.choice, use.named) == ("required", None)


# --- functions, the old form of tools


def test_functions_are_tools_of_which_one_is_called() -> None:
    request = chat(functions=[{"name": "f"}, {"name": "g"}], function_call={"name": "g"})
    use = request.tool_use
    assert use is not None
    assert [function.name for function in use.functions] == ["f", "g"]
    assert (use.named, use.parallel) == ("g", False)
    assert request.answers_in_old_form
    assert chat(functions=[{"name": "f"}], function_call="none").tool_use is None


def test_their_calls_and_results_reach_the_template_as_tools() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "42"},
    ]
    [_, call, result] = chat(messages=messages).messages_for_template()
    assert call["tool_calls"] == [
        {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert result == {"role": "tool", "content": "42", "name": "f", "tool_call_id": "call_f"}


# --- grammars, where the model is free to call


def follows(grammar: StructuredOutput, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, to_llguidance(grammar, {}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


@pytest.mark.parametrize("family", ["hermes", "mistral"])
@pytest.mark.parametrize(
    ("syntax", "definition", "is_held"),
    [("regex", 'a\n[^"]', True), ("lark", 'start: "a\\n" /[^"]/', False)],
)
def test_a_free_call_follows_a_grammar_that_can_be_held(
    family: str, syntax: Literal["lark", "regex"], definition: str, is_held: bool
) -> None:
    patch = CustomTool(name="patch", strict=True, syntax=syntax, definition=definition)
    tools = ToolUse(functions=(patch, Function(name="look")))
    grammar = SYNTAXES[family].grammar(tools)
    assert grammar is not None
    tag = SYNTAXES[family].tag("patch", True)
    for text, fits in (("a\nb", True), ('a\n"', False), ("b", False)):
        separators = (",", ": " if is_held else ":")
        call = f"{tag.begin}{json.dumps({'input': text}, separators=separators)}{tag.end}"
        assert follows(grammar, f"I patch. {call}") is (fits or not is_held), text
    assert follows(grammar, "Words.")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, "b', {"a": [1]}),
        ("", {}),
        ("[1]", {}),
        ("{broken", {}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890.0}),
        ('{"a": 1' + "0" * 400 + "}", {}),
        ('{"a":' * 300 + "1", {}),
        ('{"a": "ls \\ud800x", "b": "\\ud83d\\ude00"}', {"a": "ls \ufffdx", "b": "😀"}),
    ],
)
def test_what_breaks_off_is_an_object_that_can_be_written(arguments: str, value: dict[str, Any]) -> None:
    assert partial_object(arguments) == value
    assert orjson.dumps(partial_object(arguments))


def test_a_lark_grammar_is_shown_and_refused_where_a_call_is_demanded() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    lark = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    look = {"type": "function", "function": {"name": "look"}}
    free = chat(tools=[lark, look])
    assert free.lark_tools == ("patch",)
    assert free.tool_use is not None
    assert 'start: "a"' in free.tool_use.functions[0].for_template()["function"]["description"]
    for choice in ("required", {"type": "custom", "custom": {"name": "patch"}}):
        with pytest.raises(ApiError, match="'patch' with a Lark grammar, which is not enforced"):
            chat(tools=[lark, look], tool_choice=choice)
    assert chat(tools=[lark, look], tool_choice={"type": "function", "function": {"name": "look"}}).tool_use is not None
    assert chat(tools=[lark], tool_choice="none").lark_tools == ()
