"""A grammar for text, as it holds for the same text in a JSON string: what fits the one fits the other, escaped."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.structured.quoted_lark import ANY_QUOTED, NotQuotable, quoted_lark, quoted_regex

# What coding agents send with their tool for patches.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
EXPRESSION = r"""
start: expr
expr: term (" + " term)* | "{" expr "}"
term: INT | "x"i | "quote\""i | /[^\n"a]/ | /\// | /\x22/ | "\\"
%import common.INT
"""
LIST = r"""
start: "[" (start ("," start)*)? "]" | STRING
STRING: "\"" /[a-z]+/ "\""
%import common.WS
%ignore WS
"""
FLAT = r"""
start: (a | b | c)*  // each of them
a: /[a-c"]{2}/ | /\S\S\S/i
b: "\n\"Q"i
  | WORD "\\"
?c: /[()"]+x/
%import common (WORD, NEWLINE)
"""
_TOKENIZER = LLTokenizer("byte")
CASES = [
    (PATCH, '*** Begin Patch\n*** Add File: a.py\n+print("h\u00e9\\n")\n+\t{x}\n*** End Patch\n', True),
    (PATCH, "*** Begin Patch\n*** Add File: a.py\n*** End Patch\n", False),
    (PATCH, '*** Begin Patch\n*** Update File: "q".py\n@@ def f():\n-a\n+\n*** End of File\n*** End Patch', True),
    *[(EXPRESSION, text, True) for text in ("1 + 2", "{{1}}", "X", 'QUOTE"', "\\", "\t", "/", '"', "x + \x1b", "é")],
    *[(EXPRESSION, text, False) for text in ("ab", 'a"', '""', "\n", "{1", "***")],
    *[(LIST, text, True) for text in ('["a", \n"b"]', '[ "a" ,["b"]\n]', '"a"')],
    *[(LIST, text, False) for text in ('["a]', '["a"b"]')],
    *[(FLAT, text, True) for text in ('a"', '""', '\\"x', '\n"q', "word\\", '(")x', "")],
    (FLAT, "a\n", False),
]


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = _TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


def in_json(quoted: str) -> str:
    return f'start: "{{\\"input\\": \\"" inside "\\"}}"\ninside: %lark {{\n{quoted}\n}}'


@pytest.mark.parametrize(("grammar", "text", "fits"), CASES)
def test_the_same_texts_fit_in_a_json_string(grammar: str, text: str, fits: bool) -> None:
    assert accepts(grammar, text) is fits
    assert accepts(in_json(quoted_lark(grammar)), json.dumps({"input": text}, ensure_ascii=False)) is fits


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
def test_so_do_those_of_a_regular_expression(pattern: str, text: str, fits: bool) -> None:
    assert (re.fullmatch(pattern.replace(r"\p{L}", "[^0-9]"), text, re.ASCII) is not None) is fits
    assert accepts(in_json(quoted_regex(pattern)), json.dumps({"input": text}, ensure_ascii=False)) is fits


def test_any_text_is_any_text() -> None:
    text = "".join(map(chr, range(0x80))) + "é😀"
    assert accepts(in_json(ANY_QUOTED), json.dumps({"input": text}, ensure_ascii=False))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: %json {}",
        "start: <[5]>",
        "start: @other",
        "start: /a.*b/ start?",
        'start[lazy]: "a"',
        'start: "a" & "b"',
        "start: /[[a]b]/",
        r"start: /\p{P}/",
        "start: /a/x",
        "start: /(?s:.)/",
        "start: A\n%import common.FOO",
        'start: "a',
    ],
)
def test_what_is_more_than_texts_is_refused(grammar: str) -> None:
    with pytest.raises(NotQuotable):
        quoted_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + "->a" * 20_000,
        "%ignore A\n" * 6_000,
        '"' * 60_000,
        "start: " + '\\"' * 30_000,
        "start: /" + "." * 60_000 + "/",
        "start: /" + "[" * 60_000 + "/",
        "a[" * 30_000,
        "\n".join(f"a{number}: a{number + 1}" for number in range(400)),
    ],
)
def test_hostile_text_takes_no_time(grammar: str) -> None:
    started = time.process_time()
    with suppress(NotQuotable):
        quoted_lark(grammar)
    assert time.process_time() - started < 5
