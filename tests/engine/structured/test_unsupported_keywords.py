"""Keywords of a lenient JSON Schema that no grammar enforces are left out and named; the others are enforced."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.messages import MAX_GRAMMAR_CHARACTERS, MAX_LENIENT_CHARACTERS
from engine.structured import json_schema as schemas
from engine.structured.compiler import CompiledGrammar
from protocol.syntax.grammars import Tag, json_schema, tagged_json
from tests.engine.helpers import make_request, tokens_of
from tests.engine.structured.test_structured_output import COMPILER, TOKENIZER, changed, core_with, run

A_AND_B = {
    "a": {
        "type": "object",
        "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
        "required": ["kind", "x"],
    },
    "b": {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
}
BY_KIND = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": A_AND_B}
CIRCLE = {
    "n": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
        "required": ["v"],
    }
}
TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def lenient(schema: Any) -> CompiledGrammar:
    return COMPILER.compile(json_schema(schema, lenient=True))


def accepts(grammar: CompiledGrammar, value: Any) -> bool:
    matcher = grammar.matcher()
    token_ids = TOKENIZER.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


# A schema, what is left out of it, values that fit it all, and values that not even what is left takes.
CASES: list[tuple[dict[str, Any], list[str], list[Any], list[Any]]] = [
    (
        {"type": "object", "properties": {"tags": TAGS}},
        ["uniqueItems"],
        [{"tags": ["a"]}],
        [{"tags": [1]}],
    ),
    ({"type": "string", "pattern": "^(?!x)y"}, ["pattern"], ["y"], [1]),
    ({"type": "string", "format": "uri-template", "maxLength": 4}, ["format"], ["{a}"], ["{abc}"]),
    ({"type": "string", "not": {"const": "a"}, "minLength": 1}, ["not"], ["b"], [""]),
    (
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        ["if", "then"],
        [{"a": 1, "b": 2}],
        [3],
    ),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, ["contains", "minContains"], [[1, 1]], [{}]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["dependentRequired"], [{"b": 1}], [[]]),
    ({"type": "object", "dependencies": {"a": ["b"]}}, ["dependencies"], [{"b": 1}], [[]]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ["propertyNames"], [{"b": 1}], [[]]),
    ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ["oneOf"], ["b", 1], [2, None]),
    (
        # Within an address of its own, references mean what is there, and not the document's definitions.
        {
            "type": "object",
            "properties": {"a": {"$id": "http://example.com/a", **BY_KIND, "$defs": {"a": {"type": "array"}, "b": {}}}},
            "$defs": A_AND_B,
        },
        ["oneOf"],
        [{"a": 1}],
        [1],
    ),
    ({"items": {"$ref": "http://example.com/a"}, "maxItems": 1}, ["$ref"], [[1]], [[1, 2]]),
    ({"items": {"$ref": "#/$defs/none"}, "type": "array"}, ["$ref"], [[1]], [1]),
    (
        {"patternProperties": {"^a": {"type": "integer"}, "^ab": {}}, "additionalProperties": False, "type": "object"},
        ["patternProperties", "additionalProperties"],
        [{"ab": 1}],
        [1],
    ),
    (
        {"minProperties": 2, "type": "object", "properties": {"a": {"maxLength": 1}, "b": {}}},
        ["minProperties"],
        [{"a": "x", "b": 1}],
        [{"a": "xx"}],
    ),
    (
        # A text may repeat a name, which then counts once.
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        ["minProperties"],
        [{"a": 1, "b": 1}],
        [{"a": "x"}],
    ),
    ({"allOf": [{"$ref": "#/$defs/t"}], "$defs": {"t": TAGS}}, ["uniqueItems"], [["a", "b"]], [[1]]),
    (
        {"allOf": [A_AND_B["b"], {"not": {"required": ["x"]}}]},
        ["not"],
        [{"kind": "b"}],
        [{"kind": "a"}, {}, 1],
    ),
]

# What llguidance has keywords for, but cannot do: a refusal, with or without `strict`.
TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"items": {"multipleOf": 19_999_999, "type": "integer"}}, "multipleOf"),
    ({"properties": {"a": {"type": "integer", "minimum": 1e30}}}, "integer range"),
    (
        {"allOf": [{"$ref": "#/$defs/n"}, {"anyOf": [{"$ref": "#/$defs/n"}, A_AND_B["a"]]}], "$defs": CIRCLE},
        "stack level exceeded",
    ),
]


@pytest.mark.parametrize(("schema", "left_out", "fitting", "unfit"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_unsupported_keywords_are_left_out_and_every_value_that_fits_can_be_written(
    schema: dict[str, Any], left_out: list[str], fitting: list[Any], unfit: list[Any]
) -> None:
    with pytest.raises(InvalidRequest):
        COMPILER.compile(json_schema(schema))
    grammar = lenient(schema)
    assert list(grammar.unenforced) == left_out
    assert all(accepts(grammar, value) for value in fitting)
    assert not any(accepts(grammar, value) for value in unfit)
    assert all(
        jsonschema.Draft202012Validator(schema).is_valid(value) for value in fitting if "$ref" not in str(schema)
    )


@pytest.mark.parametrize(("schema", "words"), TOO_MUCH, ids=lambda value: json.dumps(value)[:60])
def test_what_is_too_much_for_a_grammar_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        lenient(schema)


@pytest.mark.parametrize(
    ("schema", "fitting", "unfit"),
    [
        (BY_KIND, [{"kind": "a", "x": 1}, {"kind": "b"}], [{"kind": "a"}, {"kind": "c"}]),
        (
            {"oneOf": [{"type": ["integer", "null"]}, {"anyOf": [{"const": "a"}, {"type": "object"}]}]},
            [1, "a", {}],
            ["b"],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}
                    for name in "ab"
                ]
            },
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 1}],
        ),
        ({"items": {"type": "string", "nullable": True, "enum": ["a"]}}, [["a", None]], [["b"]]),
        ({"items": {"$ref": "#/$defs/a", "nullable": True}, "$defs": {"a": {"type": "string"}}}, [["a", None]], [[1]]),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": False}, [["a"], []], [[1], ["a", "b"]]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "#x", "type": "null"}, [None], [1]),
        ({"type": "string", "title": None, "examples": "none", "allOf": []}, ["a"], [1]),
        ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"enum": [1]}}}}, [1], [2]),
        ({"type": "array", "items": {"$recursiveRef": "#"}, "$recursiveAnchor": True}, [[[]]], [[1]]),
        ({"enum": [1, "a", None, {"b": [2]}, 1.5]}, [1, "a", None, {"b": [2]}, 1.5], [2]),
        ({}, [1, [None]], []),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_schemas_of_the_wild_are_enforced_whole(schema: dict[str, Any], fitting: list[Any], unfit: list[Any]) -> None:
    for grammar in (lenient(schema), COMPILER.compile(json_schema(schema))):
        assert grammar.unenforced == ()
        assert all(accepts(grammar, value) for value in fitting)
        assert not any(accepts(grammar, value) for value in unfit)


def test_what_is_required_and_not_declared_may_be_written_where_nothing_else_may() -> None:
    closed = changed(json_schema({"type": "object", "properties": {"a": {}}, "required": ["b"]}), closed=True)
    grammar = COMPILER.compile(closed)
    assert accepts(grammar, {"b": 1})
    assert not accepts(grammar, {"b": 1, "c": 1})


def test_a_schema_that_is_left_open_on_purpose_stays_open_without_its_patterns() -> None:
    """Without its patterns it says nothing of other properties, but it has said something."""
    schema = {"type": "object", "properties": {"a": TAGS}, "patternProperties": {"^b": {}, "^bc": {}}}
    grammar = COMPILER.compile(changed(json_schema(schema, lenient=True), closed=True))
    assert accepts(grammar, {"a": [], "bc": 1})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "Invalid type: strin; a type is string, number"),
        ({"properties": [], "uniqueItems": True}, "properties must be an object"),
        ({"type": "object", "required": True}, "Expected array for 'required'"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3)"),
        (False, "allows no value"),
    ],
)
def test_what_is_no_schema_or_fits_nothing_is_refused_all_the_same(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lenient(schema)
    assert words in str(refusal.value)


def test_a_lenient_schema_may_be_long_by_its_remarks_and_no_longer_than_a_grammar_without_them() -> None:
    remarks = {"type": "object", "properties": {"a": {"type": "integer", "description": "x" * MAX_GRAMMAR_CHARACTERS}}}
    assert lenient(remarks).unenforced == ()
    assert len(lenient(remarks).enforced.value) < 100  # what the core gets
    tools = [{"type": "object", "properties": {"a": {"const": "x" * size}}} for size in (10, 90_000, 80_000, 20)]
    long = json_schema({"enum": ["x" * MAX_GRAMMAR_CHARACTERS], "description": "x"}, lenient=True)
    for structured in (
        json_schema(remarks),
        long,
        tagged_json([Tag(f"<{n}>", tool, "</>", lenient=True) for n, tool in enumerate(tools)]),
    ):
        with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_CHARACTERS} characters"):
            COMPILER.compile(structured)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_LENIENT_CHARACTERS} characters"):
        lenient({"const": "x" * MAX_LENIENT_CHARACTERS})


def test_a_schema_of_any_depth_is_refused_and_raises_nothing_else() -> None:
    for depth in range(200, 1100, 50):
        text = '{"uniqueItems":true,"items":' * depth + "{}" + "}" * depth
        with pytest.raises(InvalidRequest, match=r"nested|recursion"):
            COMPILER.compile(changed(json_schema({}, lenient=True), value=text))


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://[", "items": {"$id": "x", "uniqueItems": True}},
        {"$id": 5, "$ref": 7, "uniqueItems": True},
        {"patternProperties": [], "oneOf": 5, "format": [], "pattern": {}, "uniqueItems": True},
        {"oneOf": [{"$ref": "#/oneOf/\N{SUPERSCRIPT TWO}"}, {"$ref": f"#/oneOf/{'1' * 5000}"}, {"$ref": "#/oneOf/2"}]},
        {"oneOf": [{"type": ["x"]}, {"type": {}}, 5], "required": [[]], "properties": {"a": {"enum": [{}]}}, "not": {}},
    ],
)
def test_whatever_stands_in_a_schema_raises_nothing_but_a_refusal(schema: Any) -> None:
    for is_lenient in (False, True):
        with suppress(InvalidRequest):
            COMPILER.compile(json_schema(schema, lenient=is_lenient))
    assert COMPILER.compile(json_schema({"type": "null"})).unenforced == ()  # its threads live


def test_each_pattern_is_tried_once_and_no_more_than_some_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def validate(grammar: str) -> str:
        tried.append(grammar)
        return "no"

    monkeypatch.setattr(LLMatcher, "validate_grammar", validate)
    known: dict[str, bool] = {}
    for start in range(0, 500, 100):
        patterns = {str(number): {"pattern": f"a{number // 2}"} for number in range(start, start + 100)}
        _, left_out = schemas.without_unsupported({"properties": patterns}, known)
    assert len(tried) == len(set(tried)) == schemas.MAX_PATTERNS
    assert left_out == ()  # patterns that were not tried stay


def test_branches_are_compared_in_time_that_grows_with_the_text() -> None:
    """Also where many of them refer to one schema with many constants."""

    def seconds(count: int) -> float:
        names = [f"p{number}" for number in range(count)]
        one = {"type": "object", "required": names, "properties": {name: {"const": 1} for name in names}}
        schema = {"oneOf": [{"$ref": "#/$defs/a"}] * count, "$defs": {"a": one}}
        began = time.thread_time()
        assert "oneOf" in schemas.prepared(schema, closed=False)
        return time.thread_time() - began

    assert seconds(4000) < 40 * min(seconds(400) for _ in range(3)) + 0.1


def test_only_lenient_tags_lose_keywords_and_the_others_stay_closed() -> None:
    item = {"type": "object", "properties": {"a": TAGS}}
    strict = {"type": "object", "properties": {"b": {"type": "integer"}}}
    tags = [Tag("<a>", item, "</a>", lenient=True), Tag("<b>", strict, "</b>")]
    structured = changed(tagged_json(tags, text=False, required=True, repeat=False), closed=True)
    grammar = COMPILER.compile(structured)
    assert grammar.unenforced == ("uniqueItems",)
    assert grammar.enforced.lenient is False

    def can_write(text: str) -> bool:
        token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        matcher = grammar.matcher()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    assert can_write('<a>{"a": ["x", "x"]}</a>')
    assert can_write('<b>{"b": 1}</b>')
    assert not can_write('<b>{"c": 1}</b>')
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        COMPILER.compile(tagged_json([Tag("<a>", item, "</a>"), tags[0]]))


def test_the_core_finds_what_the_front_door_has_compiled() -> None:
    structured = json_schema({"enum": [["a"]], "uniqueItems": True}, lenient=True)
    grammar = COMPILER.compile(structured)
    before = COMPILER.num_compiled
    request = make_request([1], structured_output=grammar.enforced)
    run_of = run(core_with(COMPILER), request)
    assert tokens_of(run_of[request.request_id])
    assert COMPILER.num_compiled == before
