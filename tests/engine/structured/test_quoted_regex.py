"""A regular expression for text matches the same text, escaped, in a JSON string."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequest
from engine.structured.grammar import to_llguidance
from protocol.syntax.grammars import Tag, tagged_json

_TOKENIZER = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = _TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


def in_json(pattern: str, *, required: bool = True) -> str:
    tag = Tag('{"input": "', True, '"}', regex=pattern)
    return to_llguidance(tagged_json([tag], text=False, required=required, repeat=False), {})


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"[a-z]+://[^/\s]+", "http://x", True),
        (r"[a-z]+://[^/\s]+", "http://x\n", False),
        ("a\n.", 'a\n"', True),
        ('a\\n[^"]', 'a\n"', False),
        (r"\p{L}+\d{2}", "ü12", True),
        (r"\\?\d[\d_\\]+", r"\1_2", True),
        (r"\d+", "\N{ARABIC-INDIC DIGIT ONE}", False),
        (r"[\d_]+", "\N{ARABIC-INDIC DIGIT ONE}", False),
        (r"[^\d]", "\N{ARABIC-INDIC DIGIT ONE}", True),
        (r"(\\|\"|\t)*", '\\"\t\\', True),
        (r"(\\|\"|\t)*", "n", False),
        ('"{2}x"?\t+', '""x\t\t', True),
        ('"{2}x"?\t+', '""x"\t', True),
    ],
)
def test_the_texts_of_a_regular_expression_match_in_a_json_string(pattern: str, text: str, fits: bool) -> None:
    assert (re.fullmatch(pattern.replace(r"\p{L}", "[^0-9]"), text, re.ASCII) is not None) is fits
    assert accepts(in_json(pattern), json.dumps({"input": text}, ensure_ascii=False)) is fits


@pytest.mark.parametrize("pattern", ["(?s:.)", "[[a]b]", r"\p{P}", r"\bword", "a{"])
def test_what_cannot_be_escaped_is_refused_where_it_is_demanded_and_any_text_elsewhere(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced within a JSON string"):
        in_json(pattern)
    text = "".join(map(chr, range(0x80))) + "é😀"
    assert accepts(in_json(pattern, required=False), json.dumps({"input": text}, ensure_ascii=False))


@pytest.mark.parametrize("pattern", ["." * 60_000, "[" * 60_000, "\\" * 60_000, "(" * 60_000, "{1" * 30_000])
def test_hostile_patterns_take_no_time(pattern: str) -> None:
    started = time.process_time()
    with suppress(InvalidRequest):
        in_json(pattern)
    assert time.process_time() - started < 5
