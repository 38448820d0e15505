"""Reasoning and content out of text in any pieces; tool calls have their own tests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import FinishReason
from protocol.syntax.message_parts import (
    ContentDelta,
    MessageFormat,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    join,
)
from protocol.syntax.reasoning import BRACKETS, THINK
from tests.protocol.wire_helpers import output, pieces_of, token_bytes

THINKS = MessageFormat(reasoning=THINK)
THINKS_FROM_THE_PROMPT = MessageFormat(reasoning=THINK, reasoning_is_open=True)


def parts_of(message_format, *texts):
    parser = message_format.parser(token_bytes)
    return join([part for text in texts for part in parser.feed_text(text)] + parser.finish_text())


@pytest.mark.parametrize(
    ("message_format", "text", "parts"),
    [
        (THINKS, "<think>\nHm.\n</think>\n\nYes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        (THINKS, "\n <think>Hm. </think> Yes. ", [ReasoningDelta("Hm."), ContentDelta("Yes. ")]),
        (THINKS, "<think>\n\n</think>\n\nYes.", [ContentDelta("Yes.")]),
        (THINKS, " Yes. ", [ContentDelta(" Yes. ")]),
        (THINKS, "Use <think>a</think>.", [ContentDelta("Use <think>a</think>.")]),
        (THINKS, "<thi", [ContentDelta("<thi")]),
        (THINKS, "<think> a </thi", [ReasoningDelta("a </thi")]),
        (THINKS, "<think>a\n\n b </think>", [ReasoningDelta("a\n\n b")]),
        (THINKS, "<think>a</think>b</think>c", [ReasoningDelta("a"), ContentDelta("b</think>c")]),
        (THINKS, "<think>a < b </thin </think>b", [ReasoningDelta("a < b </thin"), ContentDelta("b")]),
        (THINKS_FROM_THE_PROMPT, "\nHm.</think>Yes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        (THINKS_FROM_THE_PROMPT, "Hm.\n", [ReasoningDelta("Hm.\n")]),
        (MessageFormat(reasoning=BRACKETS), "[THINK]a[/THINK]b", [ReasoningDelta("a"), ContentDelta("b")]),
        (MessageFormat(reasoning=THINK, show_reasoning=False), "<think>a</think>b", [ContentDelta("b")]),
        (MessageFormat(), "<think>a", [ContentDelta("<think>a")]),
    ],
)
def test_reasoning_is_told_from_the_answer(message_format, text, parts):
    assert parts_of(message_format, text) == parts
    assert parts_of(message_format, *text) == parts


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data())
def test_the_parts_do_not_depend_on_the_pieces(data):
    fragments = ["<think>", "</think>", "<", "think", ">", "</", "\n", " ", "Hm", "👩‍🚀", "答"]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=20)))
    message_format = data.draw(st.sampled_from([THINKS, THINKS_FROM_THE_PROMPT]))
    assert parts_of(message_format, *data.draw(pieces_of(text))) == parts_of(message_format, text)


def test_text_goes_out_as_soon_as_it_is_decided():
    parser = THINKS.parser(token_bytes)
    fed = [parser.feed_text(text) for text in ("<think>", "Hm", " ", "so", " </", "think>", "\n", "Yes", "\n")]
    assert fed == [
        [],
        [ReasoningDelta("Hm")],
        [],
        [ReasoningDelta(" so")],
        [],
        [],
        [],
        [ContentDelta("Yes")],
        [ContentDelta("\n")],
    ]
    assert parser.finish_text() == []


@pytest.mark.parametrize(
    ("message_format", "tokens", "count"),
    [
        (THINKS, ["<thi", "nk>", "a", "b", "</think>", "c"], 5),
        (THINKS, ["\n", "<think>", "a</th", "ink>b", "c"], 4),
        (THINKS, ["a", "<think>", "b", "</think>"], 0),
        (THINKS, ["<", "b"], 0),
        (THINKS, ["<think>", "a", "b"], 3),
        (THINKS_FROM_THE_PROMPT, ["a", "</think>", "b"], 2),
    ],
)
def test_tokens_of_the_reasoning_are_counted(message_format, tokens, count):
    spelled = dict(enumerate(word.encode() for word in tokens))
    together = message_format.parser(spelled.__getitem__)
    together.read(output("".join(tokens), token_ids=list(spelled), finish=FinishReason.STOP))
    one_by_one = message_format.parser(spelled.__getitem__)
    for token_id, word in enumerate(tokens):
        one_by_one.read(output(word, token_ids=[token_id]))
    assert together.num_reasoning_tokens == one_by_one.num_reasoning_tokens == count


def test_a_format_without_reasoning_counts_none():
    assert MessageFormat().is_plain
    assert MessageFormat().parser(token_bytes).num_reasoning_tokens is None


def test_an_output_that_ends_the_choice_gives_what_was_held_back():
    parser = THINKS.parser(token_bytes)
    assert parser.read(output("<think>a <", token_ids=[1])) == [ReasoningDelta("a")]
    assert parser.read(output("", token_ids=[2], finish=FinishReason.LENGTH)) == [ReasoningDelta(" <")]


def test_neighbours_of_one_kind_are_joined_and_no_others():
    assert join(
        [
            ReasoningDelta("a"),
            ReasoningDelta("b"),
            ContentDelta("c"),
            ContentDelta("d"),
            ToolCallStart(0, "id", "f"),
            ToolCallArguments(0, "{"),
            ToolCallArguments(0, "}"),
            ToolCallStart(1, "id", "f"),
            ToolCallArguments(1, "{}"),
        ]
    ) == [
        ReasoningDelta("ab"),
        ContentDelta("cd"),
        ToolCallStart(0, "id", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "id", "f"),
        ToolCallArguments(1, "{}"),
    ]
