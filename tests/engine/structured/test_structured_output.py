"""Grammars in the engine's core: what comes out follows them, whatever happens to the request on its way."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.messages import EngineCoreOutput, FinishReason, StructuredOutput, StructuredOutputKind
from engine.structured.compiler import GrammarCompiler
from protocol.syntax.grammars import Tag, choice, json_schema, tagged_json
from tests.engine.helpers import (
    assert_nothing_left,
    byte_level_tokenizer,
    id_of,
    make_core,
    make_request,
    run_to_end,
    sentencepiece_tokenizer,
    tokens_of,
)

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 37  # padded, as models are
EOS = 258
COMPILER = GrammarCompiler(Vocabulary(TOKENIZER), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(kind=StructuredOutputKind.REGEX, value=pattern)


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(kind=StructuredOutputKind.GRAMMAR, value=text)


def changed(structured: StructuredOutput, **changes) -> StructuredOutput:
    return msgspec.structs.replace(structured, **changes)


def core_with(compiler: GrammarCompiler | None = COMPILER, **limits) -> EngineCore:
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)}
    core = make_core(**options | limits)
    return EngineCore(core.config, core.executor, compiler)


def text_of(outputs: Sequence[EngineCoreOutput]) -> str:
    return TOKENIZER.decode(tokens_of(outputs), skip_special_tokens=True)


def run(core: EngineCore, *requests) -> dict[str, list[EngineCoreOutput]]:
    for request in requests:
        core.add(request)
    outputs = run_to_end(core, max_steps=5000)
    assert_nothing_left(core)
    return outputs


def outcome(structured: StructuredOutput, **sampling) -> tuple[str, EngineCoreOutput]:
    request = make_request([1, 2, 3], structured_output=structured, **sampling)
    outputs = run(core_with(), request)[request.request_id]
    return text_of(outputs), outputs[-1]


# --- what may come out


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (regex(r"[a-z]{3}-\d{4}"), r"[a-z]{3}-[0-9]{4}"),
        (regex(r"^(foo|bar){2}$"), r"(foo|bar){2}"),
        (choice(["yes", "no", 'may"be\n', "ja, é"]), 'yes|no|may"be\n|ja, é'),
        (choice(["\x00", "\x7f", "\u2028"]), "\x00|\x7f|\u2028"),
        (grammar('start: "a" b "."\nb: /[0-9]/ | "x" b'), r"ax*[0-9]\."),
        (grammar('root ::= "a" b "."\nb ::= [0-9] | "x" b'), r"ax*[0-9]\."),
        (grammar('start: x "b"\nx[stop="!"]: /[a-z]*/'), r"[a-z]*!b"),
    ],
)
def test_the_output_is_what_the_grammar_says_and_ends_with_it(structured: StructuredOutput, pattern: str) -> None:
    text, last = outcome(structured)
    assert re.fullmatch(pattern, text)
    assert last.finish_reason is FinishReason.STOP


def test_a_lexeme_has_no_more_tokens_than_its_grammar_says() -> None:
    counted = grammar('start: x "."\nx[max_tokens=3]: /[a-z]+/')
    for seed in range(20):
        outputs = run(core_with(), make_request([1, seed], structured_output=counted, temperature=1.0, seed=seed))
        (of_request,) = outputs.values()
        assert re.fullmatch(r"[a-z]+\.", text_of(of_request))
        assert len(tokens_of(of_request)) <= 4


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 100])
def test_json_is_complete_whatever_the_request_says_about_its_end(ignore_eos: bool, min_tokens: int) -> None:
    text, last = outcome(json_schema(PERSON), ignore_eos=ignore_eos, min_tokens=min_tokens)
    jsonschema.validate(json.loads(text), PERSON)
    assert last.finish_reason is FinishReason.STOP
    assert last.is_complete, "ended by its last token and not by one more"


def test_an_object_of_any_kind_is_json_as_far_as_it_goes() -> None:
    text, last = outcome(StructuredOutput(kind=StructuredOutputKind.JSON_OBJECT, value=""), max_tokens=20)
    assert text.startswith("{")
    assert last.finish_reason is FinishReason.LENGTH


def test_blanks_are_few_or_none_or_as_the_pattern_says() -> None:
    for structured, forbidden in [
        (json_schema(PERSON), r"[^\n\s][ \t]{2}|\n\n"),
        (changed(json_schema(PERSON), any_whitespace=False), r"[\s](?=[{}:,])"),
        (changed(json_schema(PERSON), whitespace_pattern=r"\t"), r"[ \n](?=[\":,}])"),
    ]:
        text, _ = outcome(structured)
        outside_strings = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert not re.search(forbidden, outside_strings)


def test_the_parts_of_a_closed_object_do_not_forbid_each_other() -> None:
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in ("a", "b")]
    text, _ = outcome(changed(json_schema({"type": "object", "allOf": parts}), closed=True), max_tokens=60)
    assert '"a"' in text
    assert '"b"' in text


ARGUMENTS = {"type": "object", "properties": {"f": {"const": 1}}, "required": ["f"], "additionalProperties": False}
CALL = Tag("<call>", ARGUMENTS, "</call>")


def test_tags_alone_are_a_call_and_nothing_else() -> None:
    text, last = outcome(tagged_json([CALL], text=False, required=True, repeat=False))
    assert re.fullmatch(r'<call>\{\s*"f"\s*:\s*1\s*\}</call>', text)
    assert last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("options", "text", "accepted", "complete"),
    [
        ({"text": True}, 'hi <call>{"f":1}</call> bye', True, False),
        ({"text": True}, "no call at all < <cal", True, False),
        ({"text": True}, "<call>what", False, False),
        ({"text": True, "repeat": False}, 'hi <call>{"f":1}</call>', True, True),
        ({"text": True, "required": True, "repeat": False}, 'hi <call>{"f":1}</call>', True, True),
        ({"text": False, "required": True}, '<call>{"f":1}</call><call>{"f":1}</call>', True, False),
        ({"text": False, "separator": "; "}, '<call>{"f":1}</call>; <call>{"f":1}</call>', True, False),
        ({"text": False}, "hi", False, False),
        ({"triggers": ["<"]}, "a <b", False, False),
        ({"triggers": ["<"]}, 'a <call>{"f":1}</call>', True, False),
    ],
)
def test_tags_among_text(options: dict, text: str, accepted: bool, complete: bool) -> None:
    matcher = COMPILER.compile(tagged_json([CALL], **options)).matcher()
    tokens = TOKENIZER.encode(text).ids
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) is accepted
    if accepted:
        assert matcher.is_stopped() is complete


def test_a_required_tag_lets_nobody_end_before_it() -> None:
    matcher = COMPILER.compile(tagged_json([CALL], required=True)).matcher()
    assert matcher.try_consume_tokens(TOKENIZER.encode("let me think").ids)
    assert not matcher.is_accepting()


def test_a_special_token_in_a_tag_is_that_token_and_not_its_letters() -> None:
    start = id_of(TOKENIZER, "<|im_start|>")
    matcher = COMPILER.compile(tagged_json([Tag("<|im_start|>call ", True, "")], text=False, required=True)).matcher()
    assert matcher.validate_tokens([start]) == 1
    assert matcher.validate_tokens(TOKENIZER.encode("<").ids) == 0
    among_text = COMPILER.compile(tagged_json([Tag("<|im_start|>", True, "")])).matcher()
    assert among_text.try_consume_tokens([*TOKENIZER.encode("so: ").ids, start, *TOKENIZER.encode("[1]").ids]) > 6


def test_a_sentencepiece_vocabulary_is_read_byte_by_byte() -> None:
    tokenizer = sentencepiece_tokenizer()
    compiler = GrammarCompiler(Vocabulary(tokenizer), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(2,))
    matcher = compiler.compile(regex("ab é\n")).matcher()
    ids = [id_of(tokenizer, token) for token in ("ab", "▁", "<0xC3>", "<0xA9>", "<0x0A>")]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_stopped()


# --- what happens on the way


@settings(max_examples=25, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=6),
    num_blocks=st.integers(32, 48),
    max_num_seqs=st.integers(1, 4),
    leaving=st.sets(st.integers(0, 5)),
    depth=st.integers(1, 2),
)
def test_outputs_follow_their_grammars_through_preemptions_and_departures(
    seeds: list[int], num_blocks: int, max_num_seqs: int, leaving: set[int], depth: int
) -> None:
    core = core_with(num_blocks=num_blocks, max_num_seqs=max_num_seqs, pipeline_depth=depth)
    structured = [json_schema(PERSON), None, regex("(ab){2,9}c"), choice(["one", "two"])]
    requests = [
        make_request([seed % 97, 5], seed=seed, temperature=1.0, max_tokens=90, structured_output=structured[i % 4])
        for i, seed in enumerate(seeds)
    ]
    for request in requests:
        core.add(request)
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for step in range(3000):
        if not core.has_work:
            break
        if step == 5:
            for index in leaving & set(range(len(requests))):
                core.finish_request(requests[index].request_id, FinishReason.ABORT)
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        core.scheduler.check_integrity()
    assert_nothing_left(core)
    for index, request in enumerate(requests):
        gained = outputs[request.request_id]
        if not gained or gained[-1].finish_reason is not FinishReason.STOP or index % 4 == 1:
            continue
        text = text_of(gained)
        if index % 4 == 0:
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert re.fullmatch("(ab){2,9}c|one|two", text)


def test_a_request_without_a_grammar_says_the_same_beside_one_with() -> None:
    plain = make_request([7, 8, 9], "plain", max_tokens=20)
    alone = run(core_with(), plain)["plain"]
    beside = run(core_with(), plain, make_request([7, 8], "json", structured_output=json_schema(PERSON)))
    assert tokens_of(beside["plain"]) == tokens_of(alone)


def test_others_run_while_a_grammar_is_being_compiled() -> None:
    go_on = threading.Event()

    class Slow(GrammarCompiler):
        def _compile(self, owner, structured):
            assert go_on.wait(60)
            return super()._compile(owner, structured)

    core = core_with(Slow(Vocabulary(TOKENIZER), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)))
    core.add(make_request([1], "waiting", structured_output=choice(["yes"])))
    core.add(make_request([2], "leaving", structured_output=choice(["no"])))
    core.add(make_request([3], "plain", max_tokens=4))
    ended: list[str] = []
    while not ended:
        ended += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
    assert ended == ["plain"]
    core.finish_request("leaving", FinishReason.ABORT)
    assert core.has_work
    assert core.step().outputs == []
    go_on.set()
    assert text_of(run_to_end(core, max_steps=100_000)["waiting"]) == "yes"
    assert_nothing_left(core)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    plain = make_request([1], "plain", max_tokens=4)
    broken = make_request([1], "broken", structured_output=regex("("))
    outputs = run(core_with(), broken, plain)
    assert outputs["broken"][-1].finish_reason is FinishReason.ERROR
    assert len(tokens_of(outputs["plain"])) == 4


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone() -> None:
    # After fifty letters, thousands of rules that may follow: too many for the parser's limits.
    rules = f"{'one? ' * 4000}\none: /[A-M]/ | /[N-Z]/"
    ambiguous = make_request([1], "ambiguous", structured_output=grammar(f"start: /[a-z]{{50}}/ {rules}"))
    plain = make_request([1], "plain", max_tokens=4)
    core = core_with()
    outputs = run(core, ambiguous, plain)
    end = outputs["ambiguous"][-1]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert "too complex" in end.error
    assert end.refusal is not None
    assert end.refusal.code == "grammar_too_complex"
    assert text_of(outputs["ambiguous"])[:50] not in end.error, "this goes into the log"
    assert len(tokens_of(outputs["plain"])) == 4


def test_without_a_compiler_the_request_fails() -> None:
    outputs = run(core_with(None), make_request([1], "r", structured_output=choice(["a"])))
    assert outputs["r"][-1].finish_reason is FinishReason.ERROR
