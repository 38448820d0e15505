"""What a grammar cannot enforce of a lenient JSON Schema is left out and told, and nothing else is."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest

from engine.errors import InvalidRequest
from engine.messages import MAX_GRAMMAR_CHARACTERS, MAX_LENIENT_CHARACTERS, StructuredOutput
from engine.structured import lenient as lenient_schemas
from engine.structured.compiler import CompiledGrammar
from engine.structured.relaxation import MAX_TRIES, relax
from protocol.syntax.grammars import Tag, json_schema, tagged_json
from tests.engine.helpers import make_request, tokens_of
from tests.engine.test_structured_output import COMPILER, TOKENIZER, changed, core_with, run

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
        ["/properties/tags/uniqueItems"],
        [{"tags": ["a"]}],
        [{"tags": [1]}],
    ),
    ({"type": "string", "pattern": "^(?!x)y"}, ["/pattern"], ["y"], [1]),
    ({"type": "string", "format": "uri-template", "maxLength": 4}, ["/format"], ["{a}"], ["{abc}"]),
    ({"type": "string", "not": {"const": "a"}, "minLength": 1}, ["/not"], ["b"], [""]),
    (
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        ["/if", "/then"],
        [{"a": 1, "b": 2}],
        [3],
    ),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, ["/contains", "/minContains"], [[1, 1]], [{}]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["/dependentRequired"], [{"b": 1}], [[]]),
    ({"type": "object", "dependencies": {"a": ["b"]}}, ["/dependencies"], [{"b": 1}], [[]]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ["/propertyNames"], [{"b": 1}], [[]]),
    ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ["/oneOf"], ["b", 1], [2, None]),
    (
        # Within an address of its own, references mean what is there, and not the document's definitions.
        {
            "type": "object",
            "properties": {"a": {"$id": "http://example.com/a", **BY_KIND, "$defs": {"a": {"type": "array"}, "b": {}}}},
            "$defs": A_AND_B,
        },
        ["/properties/a/oneOf"],
        [{"a": 1}],
        [1],
    ),
    ({"items": {"$ref": "http://example.com/a"}, "maxItems": 1}, ["/items/$ref"], [[1]], [[1, 2]]),
    ({"items": {"$ref": "#/$defs/none"}, "type": "array"}, ["/items/$ref"], [[1]], [1]),
    (
        {"patternProperties": {"^a": {"type": "integer"}, "^ab": {}}, "additionalProperties": False, "type": "object"},
        ["/patternProperties", "/additionalProperties"],
        [{"ab": 1}],
        [1],
    ),
    (
        {"minProperties": 2, "type": "object", "properties": {"a": {"maxLength": 1}, "b": {}}},
        ["/minProperties"],
        [{"a": "x", "b": 1}],
        [{"a": "xx"}],
    ),
    (
        # A text may repeat a name, which then counts once.
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        ["/minProperties"],
        [{"a": 1, "b": 1}],
        [{"a": "x"}],
    ),
    ({"items": {"multipleOf": 19_999_999, "type": "integer"}}, ["/items/multipleOf"], [[19_999_999]], [["a"]]),
    (
        # Of the bounds, the one that no grammar can hold goes, and the others stay.
        {"properties": {"a": {"type": "integer", "minimum": 1e30}, "b": {"maxLength": 1}, "c": {"maxItems": 1}}},
        ["/properties/a/minimum"],
        [{"a": 10**31, "b": "x", "c": [1]}],
        [{"b": "xx"}, {"c": [1, 2]}],
    ),
    ({"allOf": [{"$ref": "#/$defs/t"}], "$defs": {"t": TAGS}}, ["/$defs/t/uniqueItems"], [["a", "b"]], [[1]]),
    (
        {"allOf": [A_AND_B["b"], {"not": {"required": ["x"]}}]},
        ["/allOf/1/not"],
        [{"kind": "b"}],
        [{"kind": "a"}, {}, 1],
    ),
    (  # references in circles beside alternatives are too much, and the type is left
        {"allOf": [{"$ref": "#/$defs/n"}, {"anyOf": [{"$ref": "#/$defs/n"}, A_AND_B["a"]]}], "$defs": CIRCLE},
        ["/allOf/0/$ref", "/allOf/1/anyOf"],
        [{"v": 1}],
        [1, [], None],
    ),
]


@pytest.mark.parametrize(("schema", "left_out", "fitting", "unfit"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_the_least_is_left_out_and_every_value_that_fits_can_be_written(
    schema: dict[str, Any], left_out: list[str], fitting: list[Any], unfit: list[Any]
) -> None:
    with pytest.raises(InvalidRequest):
        COMPILER.compile(json_schema(schema))
    grammar = lenient(schema)
    (told,) = grammar.unenforced
    assert list(told.pointers) == left_out
    assert all(accepts(grammar, value) for value in fitting)
    assert not any(accepts(grammar, value) for value in unfit)
    assert all(
        jsonschema.Draft202012Validator(json.loads(told.schema)).is_valid(value)
        for value in fitting
        if "$ref" not in str(schema)
    )


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


def test_a_schema_that_is_left_open_on_purpose_stays_open_when_it_is_relaxed() -> None:
    """Without its patterns it says nothing of other properties, but it has said something."""
    schema = {"type": "object", "properties": {"a": TAGS}, "patternProperties": {"^b": {}, "^bc": {}}}
    grammar = COMPILER.compile(changed(json_schema(schema, lenient=True), closed=True))
    assert accepts(grammar, {"a": [], "bc": 1})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type: 'strin' is none of array, boolean"),
        ({"properties": [], "uniqueItems": True}, "/properties"),
        ({"type": "object", "required": True}, "/required"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3)"),
        (False, "fits nothing"),
    ],
)
def test_what_is_no_schema_or_fits_nothing_is_refused_all_the_same(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lenient(schema)
    assert words in str(refusal.value)


def test_what_is_too_large_as_a_whole_keeps_its_outermost_levels() -> None:
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    grammar = lenient({"type": "object", "properties": {"a": deep}, "required": ["a"]})
    assert accepts(grammar, {"a": [[[]]]})
    assert not accepts(grammar, {})
    assert not accepts(grammar, {"a": 1})


def test_a_schema_that_is_longer_than_a_grammar_may_be_is_enforced_as_far_as_one_can() -> None:
    remarks = {"type": "object", "properties": {"a": {"type": "integer", "description": "x" * MAX_GRAMMAR_CHARACTERS}}}
    assert lenient(remarks).unenforced == ()  # without what only people read it is short
    names = {f"name_{number}": {"type": "object", "properties": {"a": {"const": "x" * 800}}} for number in range(200)}
    grammar = lenient({"type": "object", "properties": {"all": {"type": "object", "properties": names}}})
    assert grammar.unenforced[0].pointers
    assert accepts(grammar, {"all": {"name_7": {"a": "x" * 80}}})
    assert not accepts(grammar, {"all": 1})
    tools = [{"type": "object", "properties": {"a": {"const": "x" * size}}} for size in (10, 90_000, 80_000, 20)]
    grammar = COMPILER.compile(tagged_json([Tag(f"<{n}>", tool, "</>", lenient=True) for n, tool in enumerate(tools)]))
    assert [(told.number, told.pointers) for told in grammar.unenforced] == [(1, ("",))]
    with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_CHARACTERS} characters"):
        COMPILER.compile(json_schema(remarks))
    with pytest.raises(InvalidRequest, match=f"at most {MAX_LENIENT_CHARACTERS} characters"):
        lenient({"const": "x" * MAX_LENIENT_CHARACTERS})


def test_the_compiler_is_asked_a_bounded_number_of_times() -> None:
    """However much there is to be put back, and less often if it takes long."""
    schema = {"properties": {str(number): {"maxLength": number, "pattern": "a"} for number in range(500)}}
    asked = 0

    def never(tried: Any) -> bool:
        nonlocal asked
        asked += 1
        return "maxLength" not in json.dumps(tried)

    assert relax(schema, never) is not None
    assert asked <= MAX_TRIES + 6

    def slow(tried: Any) -> bool:
        nonlocal asked
        asked += 1
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        return tried == {}

    asked = 0
    found = relax(schema, slow, seconds=0.1)
    assert found is not None
    assert found.left_out == ("",)
    assert asked == 2


def test_only_lenient_tags_are_relaxed_and_the_others_stay_closed() -> None:
    item = {"type": "object", "properties": {"a": TAGS}}
    strict = {"type": "object", "properties": {"b": {"type": "integer"}}}
    tags = [Tag("<a>", item, "</a>", lenient=True), Tag("<b>", strict, "</b>")]
    structured = changed(tagged_json(tags, text=False, required=True, repeat=False), closed=True)
    grammar = COMPILER.compile(structured)
    assert [(told.number, told.pointers) for told in grammar.unenforced] == [(0, ("/properties/a/uniqueItems",))]
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


@pytest.mark.parametrize("fits", [True, False])
def test_the_compiler_is_not_asked_for_every_one_of_many_schemas(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When their time is over, schemas are cut unasked, and all of them are compiled once."""
    monkeypatch.setattr(lenient_schemas, "ENOUGH_SECONDS", 0.0)
    schemas = [{"type": "object", "properties": {f"a{number}": TAGS, "b": {"type": "string"}}} for number in range(300)]
    tags = [Tag(f"<{number}>", schema, "</a>", lenient=True) for number, schema in enumerate(schemas)]
    asked = []

    def can_compile(tried: StructuredOutput) -> bool:
        asked.append(tried)
        return fits

    found = lenient_schemas.loosened(tagged_json(tags, text=False, required=True), can_compile)
    assert len(asked) == 1
    assert [told.number for told in found.unenforced] == list(range(300))
    kept = [tag["schema"] for tag in json.loads(found.enforced.value)["tags"]]
    if fits:
        assert found.unenforced[7].pointers == ("/properties/a7/uniqueItems",)
        assert kept[7]["properties"] == {"a7": {"type": "array", "items": {"type": "string"}}, "b": {"type": "string"}}
    else:
        assert kept == [{"type": "object"}] * 300
        assert {told.pointers for told in found.unenforced} == {("",)}


def test_the_core_finds_what_the_front_door_has_relaxed() -> None:
    structured = json_schema({"enum": [["a"]], "uniqueItems": True}, lenient=True)
    grammar = COMPILER.compile(structured)
    before = COMPILER.num_compiled
    request = make_request([1], structured_output=grammar.enforced)
    run_of = run(core_with(COMPILER), request)
    assert tokens_of(run_of[request.request_id])
    assert COMPILER.num_compiled == before
