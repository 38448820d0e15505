"""Tool calls out of text in any pieces, for every family of syntaxes."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.messages import SPECIAL_MARK
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.message_parts import (
    ContentDelta,
    MessageFormat,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    join,
)
from protocol.syntax.reasoning import NO_SPECIAL_TAGS, THINK, SpecialTags
from protocol.syntax.record import Reading
from protocol.syntax.registry import HERMES, SYNTAXES
from protocol.tools.kinds import Function, ToolUse
from tests.protocol.wire_helpers import pieces_of, token_bytes

FAMILIES = {"hermes": (), "llama3": SYNTAXES["llama3"].tags, "mistral": SYNTAXES["mistral"].tags}
TOOLS = ToolUse(functions=(Function(name="f"), Function(name="g")))


def reading_with(tags=NO_SPECIAL_TAGS):
    return Reading(tools=TOOLS, new_call_id=lambda name, index: f"id{index}", tags=tags)


def parts_of(family, *texts, reasoning=None):
    """The parts of a text in which the tags that are special tokens of the family's vocabularies are such tokens."""
    special = FAMILIES[family]
    tags = SpecialTags({tag: number for number, tag in enumerate(special)})
    new_reader = partial(SYNTAXES[family].new_reader, reading_with(tags))
    message_format = MessageFormat(reasoning=reasoning, new_tool_reader=new_reader, special_tags=tags)
    parser = message_format.parser(token_bytes)
    if len(texts) == 1:
        texts = (marked(texts[0], special),)
    parts = join([part for text in texts for part in parser.feed_text(text)] + parser.finish_text())
    assert parser.num_tool_calls == sum(isinstance(part, ToolCallStart) for part in parts)
    return parts


def marked(text, tags):
    """The text with every tag as the engine gives it if it is a special token."""
    for tag in tags:
        text = text.replace(tag, SPECIAL_MARK + tag)
    return text


def call(index, name, arguments):
    return [ToolCallStart(index, f"id{index}", name), ToolCallArguments(index, arguments)]


def content(text):
    return [ContentDelta(text)]


HERMES_CASES = {
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>': call(
        0, "f", '{"a": [1, {"b": "}"}]}'
    ),
    'Let me see.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n': [
        *content("Let me see."),
        *call(0, "f", "{}"),
    ],
    '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"x","arguments":{}}</tool_call> Done. ': [
        *call(0, "f", "{}"),
        *call(1, "x", "{}"),
        *content("Done. "),
    ],
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': call(0, "f", '{"a": 1}'),
    '<tool_call>{"name": "f"}</tool_call>': call(0, "f", "{}"),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': call(0, "f", '{"a": 1}'),
    '<tool_call>{"name": "f", "arguments": {"t": "</tool_call> \\u00e9 👩‍🚀 \\" {"}}</tool_call>': call(
        0, "f", '{"t": "</tool_call> \\u00e9 👩‍🚀 \\" {"}'
    ),
    # no end: the call is there as far as it came
    '<tool_call>{"name": "f", "arguments": {"a": "b': call(0, "f", '{"a": "b'),
    '<tool_call>{"name": "f", "arguments": {}}': call(0, "f", "{}"),
    '<tool_call>{"name": "f", "arguments": {}}</tool_': call(0, "f", "{}"),
    # no call: nothing is lost
    '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>': content(
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'
    ),
    '<tool_call>{"name": "f", "argum': content('<tool_call>{"name": "f", "argum'),
    "<tool_call>f(1)</tool_call>": content("<tool_call>f(1)</tool_call>"),
    "a <tool_call> b": content("a <tool_call> b"),
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>': content(
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>'
    ),
    '<tool_call>{"name": "f", "arguments": "hi"}</tool_call>': content(
        '<tool_call>{"name": "f", "arguments": "hi"}</tool_call>'
    ),
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>!': [
        *call(0, "f", '{"a": 01'),
        *content("}}!"),
    ],
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>': content(
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    ),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>': content(
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'
    ),
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>': call(0, "f", '{"a": "\\ud800"}'),
    '<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>': [
        *content("<tool_call>"),
        *call(0, "f", "{}"),
    ],
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_': [*call(0, "f", "{}"), *content("<tool_")],
    '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>': [*call(0, "f", "{}"), *content(', "x": 1}')],
    " Just text, a < b. \n": content(" Just text, a < b. \n"),
    "half a <tool_": content("half a <tool_"),
}
LLAMA3_CASES = {
    '{"name": "f", "parameters": {"a": 1}}': call(0, "f", '{"a": 1}'),
    '\n{"type": "function", "name": "f", "parameters": {"a": 1}}': call(0, "f", '{"a": 1}'),
    '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}': [
        *call(0, "f", "{}"),
        *call(1, "g", "{}"),
    ],
    '{"name": "f", "parameters": {}} <|pyth': [*call(0, "f", "{}"), *content("<|pyth")],
    '{"name": "f", "parameters": {}} and more': [*call(0, "f", "{}"), *content("and more")],
    '{"name": "Ada", "parameters": {}}': content('{"name": "Ada", "parameters": {}}'),
    '{"answer": 42}': content('{"answer": 42}'),
    'Try {"name": "f", "parameters": {}}': content('Try {"name": "f", "parameters": {}}'),
    '<|python_tag|>search.call(query="x")': content('search.call(query="x")'),
    "": [],
    "  ": content("  "),
}
MISTRAL_CASES = {
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]': [
        *call(0, "f", '{"a": 1}'),
        *call(1, "g", "{}"),
    ],
    'Well. [TOOL_CALLS] [{"name": "f", "arguments": {}}]': [*content("Well."), *call(0, "f", "{}")],
    '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}': [
        *call(0, "f", '{"a": "]"}'),
        *call(1, "g", "{}"),
    ],
    '[TOOL_CALLS]f{"a": 1': call(0, "f", '{"a": 1'),
    '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na': [*call(0, "f", "{}"), *content(', {"na')],
    "[TOOL_CALLS] nothing [ARGS] here": content(" nothing  here"),
    "[TOOL_CALLS][]": [],
    "a [1] b": content("a [1] b"),
}
CASES = [
    (family, text, parts)
    for family, cases in (("hermes", HERMES_CASES), ("llama3", LLAMA3_CASES), ("mistral", MISTRAL_CASES))
    for text, parts in cases.items()
]


@pytest.mark.parametrize(("family", "text", "parts"), CASES)
def test_calls_are_told_from_content(family, text, parts):
    assert parts_of(family, text) == parts
    assert parts_of(family, *marked(text, FAMILIES[family])) == parts


FRAGMENTS = [
    *(tag for each in (SYNTAXES[name] for name in FAMILIES) for tag in each.tags),
    '{"name": "f", ',
    '{"name": "g", "arguments": ',
    '"arguments": ',
    '"parameters": {"a": "',
    '{"a": [1, -2.5e3, true, null, {"b": "</tool_call>"}]}',
    '\\u12ab\\n\\"',
    *'{}[]":,;<\\ \n',
    "👩‍🚀",
    "答え",
    "0",
    "tru",
]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_the_parts_do_not_depend_on_the_pieces(data):
    family = data.draw(st.sampled_from(list(FAMILIES)))
    seed = data.draw(st.sampled_from([text for of, text, _ in CASES if of == family] + [""]))
    text = seed + "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    pieces = data.draw(pieces_of(marked(text, FAMILIES[family])))
    assert parts_of(family, "", *pieces) == parts_of(family, text) == parts_of(family, "", *"".join(pieces))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=4)


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), arguments=json_objects, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_any_arguments_arrive_as_they_were_written(data, arguments, ascii_only, indent):
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    for family, text in {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
    }.items():
        assume(not any(tag in written for tag in FAMILIES[family]))  # it would be a special token in the arguments
        pieces = data.draw(pieces_of(marked(text, FAMILIES[family])))
        assert parts_of(family, "", *pieces) == call(0, "f", written)


@settings(deadline=None)
@given(
    data=st.data(), text=st.text() | json_values.map(json.dumps) | st.text('{}[]",:\\0123-.etruefalsn ', max_size=20)
)
def test_the_scanner_agrees_with_the_json_module(data, text):
    scanner, end = JsonScanner(), 0
    for piece in data.draw(pieces_of(text + " ")):  # the blank ends a number
        if not scanner.is_done and not scanner.is_broken:
            end += scanner.scan(piece)
    try:
        json.loads(text, parse_constant=lambda name: pytest.fail(name) if scanner.is_done else None)
    except ValueError:
        assert scanner.is_broken or not scanner.is_done or text[end:].strip(" \t\n\r")
    else:
        constants = any(word in text for word in ("NaN", "Infinity"))
        assert constants or (scanner.is_done and not text[end:].strip(" \t\n\r"))


def test_the_scanner_refuses_brackets_without_end():
    scanner = JsonScanner()
    assert scanner.scan("[" * 1000) == 256
    assert scanner.is_broken


def test_arguments_are_sent_while_they_are_written():
    reader = HERMES.new_reader(reading_with())
    fed = [
        reader.feed_text(piece)
        for piece in (
            "I look. <tool",
            '_call>{"name": ',
            '"f", "argu',
            'ments": {"city',
            '": "Par',
            'is"}}</tool_call>',
        )
    ]
    assert fed == [
        [ContentDelta("I look.")],
        [],
        [],
        [ToolCallStart(0, "id0", "f"), ToolCallArguments(0, '{"city')],
        [ToolCallArguments(0, '": "Par')],
        [ToolCallArguments(0, 'is"}')],
    ]


def test_no_calls_are_looked_for_in_reasoning():
    thought = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f'<think>Perhaps {thought}</think>\n<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>'
    expected = [ReasoningDelta(f"Perhaps {thought}"), *call(0, "g", "{}")]
    assert parts_of("hermes", text, reasoning=THINK) == parts_of("hermes", *text, reasoning=THINK) == expected
