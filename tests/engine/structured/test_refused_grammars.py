"""What cannot be enforced is refused with a reason, and no grammar takes more than its part of the compiler."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest

from engine.detokenizer import Vocabulary
from engine.errors import InvalidRequest
from engine.messages import StructuredOutput, StructuredOutputKind
from engine.structured.compile_queue import Owner
from engine.structured.compiler import GrammarCompiler
from engine.structured.grammar import to_llguidance
from protocol.syntax.grammars import Tag, choice, json_schema, tagged_json
from tests.engine.helpers import (
    make_request,
    sentencepiece_tokenizer,
    tokens_of,
)
from tests.engine.structured.test_structured_output import (
    COMPILER,
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    changed,
    core_with,
    grammar,
    regex,
    run,
)


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (json_schema({"type": "object", "if": {}}), '"if"'),
        (json_schema({"properties": {"a": {"type": "array", "uniqueItems": True}}}), '"uniqueItems"'),
        (json_schema({"type": "string", "format": "uri-template"}), "uri-template"),
        (json_schema({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}), "oneOf"),
        (json_schema({"$ref": "http://example.com/schema"}), "example.com"),
        (json_schema({"type": "object", "minProperties": 2}), "minProperties is only supported"),
        (json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum (3)"),
        (json_schema(False), "allows no value"),
        (changed(json_schema({}), value="[" * 100_000), "not valid JSON"),
        (changed(json_schema({}), value="x" * 200_000), "at most 131072 characters"),
        (changed(json_schema({}), whitespace_pattern="("), "regex"),
        (changed(json_schema({}), whitespace_pattern="a" * 1025), "at most 1024 characters in its whitespace pattern"),
        (regex("a("), "unclosed group"),
        (regex("(?=a)b"), "look-ahead"),
        (regex("(" * 10_000), "regex"),
        (grammar("start: missing"), "missing"),
        (grammar('begin: "a"'), "start"),
        (grammar("start: start"), "no output fits it"),
        (grammar('{"grammars": []}'), "Lark or GBNF"),
        (grammar('root ::= "a'), "GBNF"),
        (grammar("root ::= missing"), "missing"),
        (grammar(f"root ::= {'(' * 5000}"), "deep"),
        (grammar("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(500))), "at most 400 rules"),
        (grammar(f"start: {'(' * 5000}"), "deep"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(structured: StructuredOutput, words: str) -> None:
    for _ in range(2):  # a refusal is remembered
        with pytest.raises(InvalidRequest) as refusal:
            COMPILER.compile(structured)
        assert refusal.value.param == "structured_output"
        assert words in str(refusal.value)
        assert len(str(refusal.value)) < 600


@pytest.mark.slow
def test_a_schema_of_any_depth_is_refused_and_raises_nothing_else() -> None:
    """What Python can still decode it may not be able to copy."""
    for depth in range(200, 1100, 5):
        with pytest.raises(InvalidRequest, match=r"nested|recursion"):
            COMPILER.compile(changed(json_schema({}), value='{"items":' * depth + "{}" + "}" * depth))


MULTIPLE = {"type": "integer", "multipleOf": 19_999_999}
PRIMES = [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983, 977)]


@pytest.mark.parametrize(
    "structured",
    [
        json_schema(MULTIPLE),
        json_schema({"type": "number", "multipleOf": 1e300}),
        json_schema({"type": "number", "multipleOf": 0.499979}),
        json_schema({"type": "number", "multipleOf": -499_979}),
        json_schema({"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": MULTIPLE}}),
        json_schema({"anyOf": PRIMES}),
        json_schema({"allOf": PRIMES}),
        json_schema({"properties": {str(prime["multipleOf"]): prime for prime in PRIMES * 3}, "patternProperties": {}}),
        json_schema({"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": PRIMES[1]}}),
        json_schema({"properties": {str(n): {"type": "integer", "multipleOf": n} for n in range(900, 1000)}}),
        changed(json_schema({}), value=r'{"type":"integer","multiple\u004ff":19999999}'),
        grammar(f'start: "a" %json {json.dumps(MULTIPLE)}'),
        grammar("start: " + " | ".join(f"%json {json.dumps(prime)}" for prime in PRIMES)),
        tagged_json([Tag("<a>", MULTIPLE, "</a>")]),
    ],
)
def test_divisors_with_more_remainders_than_the_compiler_can_bear_are_refused_by_name(
    structured: StructuredOutput,
) -> None:
    """None of the compiler's own limits stops it there: some of these take minutes and gigabytes."""
    before = time.thread_time()
    with pytest.raises(InvalidRequest, match="multipleOf takes at most 10000") as refusal:
        to_llguidance(structured, {})
    assert refusal.value.code == "grammar_too_complex"
    assert time.thread_time() - before < 1


NAMES = {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(2000)}}


@pytest.mark.parametrize(
    "structured",
    [
        json_schema(NAMES),
        json_schema({"properties": {str(n): {"patternProperties": {f"^a{n}$": {}}} for n in range(129)}}),
        tagged_json([Tag("<a>", {"items": NAMES}, "</a>")]),
        grammar(f"start: %json {json.dumps(NAMES)}"),
        changed(json_schema({}), value=json.dumps(NAMES).replace("patternProp", "\\u0070atternProp")),
    ],
)
def test_more_patterns_of_names_than_the_compiler_can_bear_are_refused(structured: StructuredOutput) -> None:
    """None of the compiler's own limits stops it there: these would take hours."""
    with pytest.raises(InvalidRequest, match="patternProperties takes at most 128 different patterns") as refusal:
        to_llguidance(structured, {})
    assert refusal.value.code == "grammar_too_complex"


def test_too_many_patterns_of_names_are_left_out_where_a_schema_may_lose_keywords() -> None:
    assert COMPILER.compile(json_schema(NAMES, lenient=True)).unenforced == ("patternProperties",)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {str(n): {"type": "object", "patternProperties": {"^x-": {}}} for n in range(300)}},
        {"type": "integer", "multipleOf": 10_000},
        {"type": "number", "multipleOf": 0.01},
        {"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 5}, "c": {"multipleOf": 1000}}, "anyOf": [{}]},
        {"properties": {"multipleOf": {"type": "integer"}}},
    ],
)
def test_usual_divisors_are_taken(schema: dict) -> None:
    COMPILER.compile(json_schema(schema))


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (json_schema({"type": "integer", "multipleOf": 5003, "minimum": 12345, "maximum": 98765432109876543}), "lexer"),
        (grammar(f'start: {"one? " * 6000}\none: "a" | "b"'), "parser"),
        (grammar(f'start: {"(" * 60_000}"a"{")" * 60_000}'), "lark grammar too deeply nested"),
        (changed(json_schema({}), value='{"items":' * 200 + "{}" + "}" * 200), "recursion limit exceeded"),
        (changed(json_schema({}), value='{"items":' * 600 + "{}" + "}" * 600), "nested too deeply"),
        (json_schema({"type": "string", "pattern": f"^{'(' * 1000}a{')' * 1000}$"}), "regex"),
    ],
)
def test_each_limit_of_the_compiler_is_called_too_complex(structured: StructuredOutput, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        COMPILER.compile(structured)
    assert refusal.value.code == "grammar_too_complex"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "int64"},
        {"type": "array", "uniqueItems": False},
        {"properties": {"format": {"const": 1}, "uniqueItems": {"enum": [False]}}, "examples": [{"format": "x"}]},
        {"type": "object", "discriminator": {"propertyName": "x"}, "nullable": True, "x-anything": 1},
    ],
)
def test_remarks_do_no_harm(schema: dict) -> None:
    COMPILER.compile(json_schema(schema))


def test_chains_of_references_do_not_run_out_of_stack() -> None:
    """Each link is a recursion of native code. Some thousands of them end a process whose stack is the usual one."""
    link = '"%d":{"items":{"$ref":"#/$defs/%d"}},'
    links = "".join(link % (i, i + 1) for i in range(3000))
    schema = f'{{"$defs":{{{links}"3000":{{"type":"string"}}}},"$ref":"#/$defs/0"}}'
    assert len(schema) > 100_000
    compiled = COMPILER.compile(StructuredOutput(kind=StructuredOutputKind.JSON_SCHEMA, value=schema))
    assert compiled.matcher().try_consume_tokens(TOKENIZER.encode("[[[").ids) == 3


def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(Vocabulary(TOKENIZER), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    first = choice(["first"])
    kept = compiler.compile(first)
    assert compiler.compile(first) is kept
    for number in range(200):
        compiler.compile(choice([f"number {number}"]))
    assert compiler.find(first) is None
    assert compiler.find(choice(["number 199"])) is not None
    assert len(compiler._cache) <= 128


def test_a_grammar_of_one_tenant_or_salt_is_compiled_again_for_another() -> None:
    """Else time would tell what others have asked for."""
    compiler = GrammarCompiler(Vocabulary(TOKENIZER), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    for structured in (choice(["first"]), regex("(")):
        before = compiler.num_compiled
        for _ in range(2):
            for owner in (Owner("a"), Owner("b"), Owner("a", "salt"), Owner("b", "salt")):
                with suppress(InvalidRequest):
                    compiler.compile(structured, owner)
        assert compiler.num_compiled - before == 4
    requests = [make_request([1], tenant=tenant, structured_output=choice(["first"])) for tenant in ("a", "c")]
    before = compiler.num_compiled
    run(core_with(compiler), *requests)
    assert compiler.num_compiled - before == 1, "the engine's grammars are the tenant's, too"


def test_what_only_one_text_can_follow_is_written_in_the_models_own_tokens() -> None:
    """Also where the tokenizer would put a space before it, normalize it, or take it for a special token."""
    for tokenizer, eos in ((TOKENIZER, EOS), (sentencepiece_tokenizer(), 2)):
        vocabulary = Vocabulary(tokenizer)
        compiler = GrammarCompiler(vocabulary, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(eos,))
        for text in ("hello ab", "é <s>", "<|im_end|>", "  a", "日本\n"):
            core = core_with(compiler, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(eos,))
            request = make_request([5], structured_output=choice([text]))
            token_ids = tokens_of(run(core, request)[request.request_id])
            assert b"".join(map(vocabulary.token_bytes, token_ids)).decode() == text
            assert not vocabulary.special_ids.intersection(token_ids)


@pytest.mark.parametrize(
    "endless",
    [
        grammar('start: A "a"\nA: /a+/'),
        grammar('%llguidance {"no_forcing": false}\nstart: A "a"\nA: /a+/'),
        changed(json_schema({"const": {"a": {}}}), whitespace_pattern=r"\}+"),
        tagged_json([Tag('"', True, '"}', regex="a*b?")], text=False, required=True, repeat=False),
        tagged_json([Tag('"', True, 'aa"}', regex="a+")], text=False, required=True, repeat=False),
    ],
    ids=["lark", "forced by hand", "whitespace", "quoted", "swallowed"],
)
def test_a_terminal_that_swallows_what_must_follow_it_holds_up_nobody(endless: StructuredOutput) -> None:
    """One byte must follow the other for ever, so that whoever looks ahead for what is forced does not come back."""
    COMPILER.submit(endless).result(timeout=60).matcher()
