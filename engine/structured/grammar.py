"""The translation of a `StructuredOutput` into the text that llguidance compiles.

llguidance's notation is Lark's with extensions: ``%json {...}`` is a JSON Schema as a rule, ``<[7]>`` is the token with
that id, and a terminal marked ``[lazy]`` matches as little text as possible.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import structs

from engine.errors import InvalidRequest
from engine.messages import GRAMMAR_TOO_COMPLEX, StructuredOutput, StructuredOutputKind
from engine.structured.json_schema import prepared, uncountable, without_unsupported

# Compiling a chain of definitions takes time quadratic in its length: 0.3 s for 300 of them, 7 s for 1,000.
MAX_DEFINITIONS = 400
# GBNF is translated in Python, with the interpreter lock held.
MAX_GBNF_CHARACTERS = 16 * 1024
# A blank, or a line break and an indentation. If any number of blanks is allowed, small models write blanks forever.
JSON_WHITESPACE = r" |\n[ \t]{0,64}"

# The time to compare patterns of `patternProperties` grows with the fourth power of their number, without a limit in
# llguidance: 0.2 s for 128 of them, 22 s for 400.
MAX_NAME_PATTERNS = 128

_DECODER = json.JSONDecoder()
_EMBEDDED_JSON = re.compile(r"%json\s*")
_DEFINITION = re.compile(r"^[ \t]*[!?]?\w[^\"'/\n]*:", re.MULTILINE)
_START = re.compile(r"^[ \t]*start[ \t]*:(?!:)", re.MULTILINE)
_WITH_SCHEMAS = (StructuredOutputKind.JSON_SCHEMA, StructuredOutputKind.GRAMMAR, StructuredOutputKind.STRUCTURAL_TAG)
_ANY_TEXT = r"/(.|\n)*/"
_NO_FORCING = '%llguidance {"no_forcing": true}'  # if a grammar has several, the last one counts


def to_llguidance(structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar for llguidance. `special_tokens` are the ids of the model's special tokens, by their text.

    Raises InvalidRequest for a grammar that is refused before it is compiled.
    """
    if structured.kind in _WITH_SCHEMAS:
        excess = _excessive_divisor(structured.value, combined=structured.kind is not StructuredOutputKind.JSON_SCHEMA)
        if excess is not None:
            raise refused(excess, code=GRAMMAR_TOO_COMPLEX)
        _check_name_patterns(structured)
    grammar = _grammar(structured, special_tokens)
    if structured.reasoning is not None:
        opening, closing = structured.reasoning
        begun, ended, before = (
            _pieces(text, special_tokens) if text else [] for text in (opening, closing, structured.answer_opening)
        )
        grammar = _after_reasoning(grammar, begun, ended, before)
    return f"{_as_lark(grammar)}\n{_NO_FORCING}" if _may_never_end(structured) else grammar


def _check_name_patterns(structured: StructuredOutput) -> None:
    """Raise InvalidRequest if all schemas together have too many different patterns in `patternProperties`."""
    waiting: list[Any] = []
    if structured.kind is StructuredOutputKind.GRAMMAR:
        for found in _EMBEDDED_JSON.finditer(structured.value):
            with suppress(ValueError, RecursionError):  # llguidance will refuse it and say why
                waiting.append(_DECODER.raw_decode(structured.value, found.end())[0])
    else:
        waiting.append(_parsed(structured.value))
    patterns: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(names := value.get("patternProperties"), dict):
                patterns.update(names)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if len(patterns) > MAX_NAME_PATTERNS:
        reason = f"patternProperties takes at most {MAX_NAME_PATTERNS} different patterns in all, got {len(patterns)}."
        raise refused(reason, code=GRAMMAR_TOO_COMPLEX)


def _may_never_end(structured: StructuredOutput) -> bool:
    """Return True if a terminal of the client may also match the text that must follow it, as in ``/a+/ "a"``.

    Then the next byte is forced forever, and the compiler, which looks ahead for forced bytes, would not return. In
    JSON without the client's own whitespace, punctuation ends every terminal.
    """
    if structured.kind is StructuredOutputKind.GRAMMAR or structured.whitespace_pattern is not None:
        return True
    if structured.kind is StructuredOutputKind.STRUCTURAL_TAG:
        tags = _parsed(structured.value)["tags"]
        return any("regex" in tag or not tag["end"].startswith("}") for tag in tags)
    return '"x-guidance"' in structured.value


def _grammar(structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    match structured.kind:
        case StructuredOutputKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_json_schema(_parsed(structured.value), structured))
        case StructuredOutputKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(_json_schema({"type": "object"}, structured))
        case StructuredOutputKind.REGEX:
            return f"start: /{regex_to_lark(structured.value, 'd')}/"  # only ASCII digits
        case StructuredOutputKind.CHOICE:
            return _choice(_parsed(structured.value))
        case StructuredOutputKind.GRAMMAR:
            return _lark(structured.value)
        case StructuredOutputKind.STRUCTURAL_TAG:
            return _tagged(_parsed(structured.value), structured, special_tokens)


def refused(reason: str, *, code: str | None = None) -> InvalidRequest:
    """Return the error that refuses a grammar. The dialects replace `structured_output` by their name of the field."""
    return InvalidRequest(f"structured_output cannot be enforced: {reason}", param="structured_output", code=code)


def supported_part(structured: StructuredOutput) -> tuple[StructuredOutput, tuple[str, ...]]:
    """Return a lenient `StructuredOutput` without the keywords that llguidance lacks, and the names of these keywords.

    Only lenient tags lose keywords. Raises InvalidRequest for invalid JSON, and RecursionError for a schema nested too
    deeply.
    """
    value = _parsed(structured.value)
    is_tagged = structured.kind is StructuredOutputKind.STRUCTURAL_TAG
    places = value["tags"] if is_tagged else [{"schema": value, "lenient": True}]
    unenforced: dict[str, None] = {}
    patterns: dict[str, bool] = {}
    for place in (each for each in places if "schema" in each):
        place["schema"] = prepared(place["schema"], closed=structured.closed)
        if place["lenient"] and isinstance(place["schema"], dict):
            place["schema"], names = without_unsupported(place["schema"], patterns)
            unenforced |= dict.fromkeys(names)
    text = msgspec.json.encode(value if is_tagged else places[0]["schema"]).decode()
    return structs.replace(structured, value=text, lenient=False, closed=False), tuple(unenforced)


def _parsed(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise refused("it is not valid JSON, or nested too deeply.") from None


def _json_schema(schema: Any, structured: StructuredOutput) -> str:
    """Return a JSON Schema with llguidance's options, as JSON. Options of the request override those in the schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused("a JSON Schema must be an object or true; false allows no value.")
    options = schema.get("x-guidance")
    whitespace = JSON_WHITESPACE if structured.whitespace_pattern is None else structured.whitespace_pattern
    ours: dict[str, Any] = {"lenient": False, "whitespace_flexible": structured.any_whitespace}
    if structured.any_whitespace:
        ours["whitespace_pattern"] = whitespace
    options = {**options, **ours} if isinstance(options, dict) else ours
    try:
        whole = prepared(schema, closed=structured.closed)
        if (complaint := uncountable(whole)) is not None:
            raise refused(complaint)
        return msgspec.json.encode({**whole, "x-guidance": options}).decode()
    except RecursionError:
        raise refused("it is nested too deeply.", code=GRAMMAR_TOO_COMPLEX) from None


def _choice(texts: Sequence[str]) -> str:
    # One terminal for all choices: a rule with thousands of alternatives would exceed the parser's limits.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, texts))}"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode().replace("\x7f", r"\u007f")  # which Lark's lexer does not take as it is


def _lark(text: str) -> str:
    if text.lstrip().startswith("{"):
        raise refused("it must be in the notation of Lark or GBNF. Send a JSON Schema in the field for JSON Schemas.")
    is_gbnf = "::=" in text and _START.search(text) is None
    count = text.count("::=") if is_gbnf else sum(1 for _ in _DEFINITION.finditer(text))
    if count > MAX_DEFINITIONS:
        raise refused(f"it takes at most {MAX_DEFINITIONS} rules and terminals, got {count}.")
    return _from_gbnf(text) if is_gbnf else text


def _from_gbnf(text: str) -> str:
    if len(text) > MAX_GBNF_CHARACTERS:
        raise refused(f"in GBNF it takes at most {MAX_GBNF_CHARACTERS} characters, got {len(text)}.")
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise refused("it is nested too deeply.") from None
    except Exception as error:  # some faults raise other errors than the translator's own
        raise refused(f"it is not valid GBNF: {error}") from None


# --- reasoning


def _after_reasoning(grammar: str, opening: Sequence[str], closing: Sequence[str], before: Sequence[str]) -> str:
    """Return Lark: text between two tags, then `before` and `grammar`. Tags and `before` are given as Lark literals.

    Without an opening tag the prompt has begun the reasoning; with one, the reasoning is optional.
    """
    grammar = _as_lark(grammar)
    lazy = "" if closing[0].startswith("<[") else "[lazy]"  # text cannot contain a special token
    reasoning = f"{' '.join(opening)} reasoning_end reasoning_gap?"
    return "\n".join(
        [
            _START.sub("after_reasoning:", grammar, count=1),
            f"REASONING_TEXT: {_ANY_TEXT}",
            r"reasoning_gap: /[ \t\r\n]{1,8}/",
            f"reasoning_end{lazy}: REASONING_TEXT {' '.join(closing)}",
            f"start: {f'({reasoning})?' if opening else reasoning} {' '.join(before)} after_reasoning",
        ]
    )


def _as_lark(grammar: str) -> str:
    if not grammar.startswith("{"):
        return grammar
    schema = msgspec.json.decode(grammar)["grammars"][0]["json_schema"]  # llguidance's own form
    return f"start: %json {msgspec.json.encode(schema).decode()}"


# --- structural tags


def _tagged(value: Mapping[str, Any], structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Return the Lark grammar for a value of `protocol.syntax.grammars.tagged_json`."""
    tags, triggers = value["tags"], value["triggers"]
    lines: list[str] = []
    inside = [_between_tags(tag, structured, value["required"]) for tag in tags]
    rules = {text: f"inside_{number}" for number, text in enumerate(dict.fromkeys(inside))}  # tags mostly share one
    lines += [f"{rule}: {text}" for text, rule in rules.items()]

    def literal(text: str) -> str:
        return " ".join(_pieces(text, special_tokens))

    if not value["text"]:
        bodies = (f"{literal(tag['begin'])} {rules[inside[n]]} {literal(tag['end'])}" for n, tag in enumerate(tags))
        lines += [f"tag: {' | '.join(bodies)}", *([f"TEXT: {_ANY_TEXT}"] if "TEXT" in inside else [])]
        more = f"({literal(value['separator'])} tag)*" if value["repeat"] else ""
        return _grammar_of(f"tag {more}" if value["required"] else f'"" | tag {more}', lines)

    lines.append(f"TEXT: {_ANY_TEXT}")
    alternatives = []
    for number, trigger in enumerate(triggers):
        begun = [(n, tag) for n, tag in enumerate(tags) if _trigger_of(tag["begin"], triggers) == trigger]
        if not begun:
            continue
        pieces = _pieces(trigger, special_tokens)
        if pieces[0].startswith("<["):  # a special token, which text never contains
            lines.append(f"head_{number}: TEXT {' '.join(pieces)}")
        elif len(pieces) == 1:
            lines.append(f"head_{number}[lazy]: TEXT {pieces[0]}")
        else:
            raise refused(f"the trigger {trigger!r} contains a special token, so it must begin with it.")
        rest = (
            f"{literal(tag['begin'].removeprefix(trigger))} {rules[inside[n]]} {literal(tag['end'])}"
            for n, tag in begun
        )
        lines.append(f"tag_{number}: head_{number} ({' | '.join(rest)})")
        alternatives.append(f"tag_{number}")
    lines.append(f"tag: {' | '.join(alternatives)}")
    lines.append("tail: TEXT")
    match value["required"], value["repeat"]:
        case True, True:
            return _grammar_of("tag+ tail", lines)
        case True, False:
            return _grammar_of("tag", lines)
        case False, True:
            return _grammar_of("tag* tail", lines)
        case _:
            return _grammar_of("tag | tail", lines)


def _grammar_of(start: str, lines: Sequence[str]) -> str:
    # `start` comes first, because a nested grammar has its own `start`.
    return "\n".join(["%llguidance {}", f"start: {start}", *lines])


def _between_tags(tag: Mapping[str, Any], structured: StructuredOutput, required: bool) -> str:
    """Return the right-hand side of the rule for a tag's content."""
    if "schema" not in tag:
        return "TEXT"
    if "regex" not in tag:
        return f"%json {_json_schema(tag['schema'], structured)}"
    try:
        return f"%lark {{\nstart: /{_quoted_regex(tag['regex'])}/\n}}"
    except InvalidRequest:
        if required:
            raise
        return f"%lark {{\nstart: /{_ANY_QUOTED}/\n}}"  # if no call is required, the pattern is not enforced


def _trigger_of(begin: str, triggers: Iterable[str]) -> str | None:
    return max((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)


def _pieces(text: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return `text` as literals of Lark, with special tokens by their ids."""
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    if not names:
        return [_quoted(text)]
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [f"<[{special_tokens[part]}]>" if part in special_tokens else _quoted(part) for part in parts if part]


# --- regular expressions behind JSON's escapes
#
# The text of a custom tool is one string in a call's arguments, so its pattern has to match the escaped string.
# Characters are escaped one by one, and no escape sequence is a prefix of another: so it is enough to escape each atom
# of the pattern.

_ESCAPES = {
    character: msgspec.json.encode(character).decode()[1:-1]
    for character in [*map(chr, range(0x20)), '"', "\\"]  # characters that JSON takes only in escaped form
}
_PLAIN = r'[^"\\\x00-\x1F]'
_SHORT = {character: code[1] for character, code in _ESCAPES.items() if len(code) == 2}
_LONG = {character: code[-2:] for character, code in _ESCAPES.items() if len(code) > 2}
_ALL_LONG = "0[0-7bef]|1[0-9a-f]"
_CODE_OF_ANY = rf'\\(?:["\\bfnrt]|u00(?:{_ALL_LONG}))'
_ANY_QUOTED = rf"(?:{_PLAIN}|{_CODE_OF_ANY})*"
_REGEX_ATOM = re.compile(
    r"""
    (?P<group> \( (?: \? (?: P?<\w+> | [A-Za-z-]*:? ) )? )
  | (?P<repeat> \{ [0-9, ]* \} [?+]? )
  | (?P<set> \[ \^? \]? (?: \\. | [^\]\\] )* \] | \. | \\[dDwWsS] | \\p(?: [LMN] | \{[LMN][a-z]?\} ) )
  | (?P<one> \\x[0-9A-Fa-f]{2} | \\u[0-9A-Fa-f]{4} | \\[^pPxubBAzZ0-9] | \\0 | [^\\()|*+?^$\[\]{}.] )
  | (?P<operator> [)|*+?^$] )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_LITERAL = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # flags of Lark's regular expressions


def _quoted_regex(pattern: str) -> str:
    """Return the regular expression that matches the same texts in their escaped JSON form."""
    literal = re.sub(r"\\.|/|\n", lambda found: _IN_LITERAL.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return "".join(_atoms(literal))


def _with_ascii_digits(atom: str) -> str:
    """Return a set or an escape with `\\d` limited to ASCII digits, as in JSON Schema's patterns."""
    if atom.startswith("["):
        return re.sub(r"\\(.)", lambda each: "0-9" if each[1] == "d" else each[0], atom, flags=re.DOTALL)
    return "[0-9]" if atom == r"\d" else atom


def _atoms(pattern: str) -> Iterator[str]:
    position = 0
    while position < len(pattern):
        found = _REGEX_ATOM.match(pattern, position)
        if found is None:
            raise _unquotable(repr(pattern[position : position + 8]))
        position = found.end()
        atom = _with_ascii_digits(found[0])
        if found["group"] and re.search(r"\?[^:<]*[sx]|\?[=!]", atom):
            raise _unquotable(atom[:20])
        if found["set"] or found["one"]:
            is_repeated = pattern[position : position + 1] in ("*", "+", "?", "{")
            # An escape sequence of two characters must be repeated as a whole.
            yield _one_character(f"\\{atom}" if is_repeated and atom in _ESCAPES else atom)
        else:
            yield atom


@lru_cache(maxsize=256)
def _one_character(atom: str) -> str:
    """Return the atom that matches the escaped forms of the characters that `atom` matches."""
    if atom.startswith(r"\p"):  # letters, marks and numbers
        return atom
    if atom in _ESCAPES or (len(atom) == 1 and atom != "."):
        return re.escape(_ESCAPES[atom]) if atom in _ESCAPES else atom
    if atom[0] == "[" and re.search(r"\[|&&|--|~~|\\[pPbBuUxzZA](?![0-9A-Fa-f])", atom[1:]):
        raise _unquotable(atom[:20])
    try:
        matches = re.compile(atom, re.ASCII).fullmatch
    except re.error:
        raise _unquotable(atom[:20]) from None
    special = [character for character in _ESCAPES if matches(character)]
    if not special:
        return atom
    short = "".join(re.escape(_SHORT[each]) for each in special if each in _SHORT)
    long = "|".join(_LONG[each] for each in special if each in _LONG)
    if len(long) == 3 * len(_LONG) - 1:
        long = _ALL_LONG
    codes = [f"[{short}]"] if short else []
    codes += [f"u00(?:{long})"] if long else []
    escaped = rf"(?-i:\\(?:{'|'.join(codes)}))"
    if atom[0] != "[" and atom not in (".", r"\D", r"\W", r"\S", r"\s"):
        return escaped  # exactly one character
    plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
    return f"(?:{plain}|{escaped})"


def _unquotable(part: str) -> InvalidRequest:
    return refused(f"{part} in a regular expression cannot be enforced within a JSON string.")


# --- divisors

# The compiler's automaton has a state for each remainder, without a limit in llguidance: 10,000 take 0.3 s and some MB,
# 500,000 take 10 s and 170 MB. Decimals count by their digits: 0.25 counts as 25.
MAX_DIVISOR = 10_000

_DIVISOR = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][0-9.eE+-]*)')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
# With these keywords one number may have two divisors; its automaton then has a state for each pair of remainders.
_COMBINING = re.compile(r'"(?:allOf|anyOf|oneOf|patternProperties)"\s*:|"\$ref"\s*:\s*"[^"]*"\s*,|,\s*"\$ref"\s*:')


def _excessive_divisor(text: str, *, combined: bool) -> str | None:
    """Return an error message about the values of `multipleOf` in a text with JSON Schemas; None if they are allowed.

    `combined` means that several of its schemas may apply to one value. The text is searched, not parsed, so
    `multipleOf` is found at any depth and in any notation, but also in examples, where it has no effect.
    """
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    divisors: set[Fraction] = set()
    total = 0
    for (number,) in map(re.Match.groups, _DIVISOR.finditer(text)):
        states = _states(number)
        if states > MAX_DIVISOR:
            return f"multipleOf takes at most {MAX_DIVISOR}, decimals counted by their digits, got {number[:40]}."
        divisor = abs(Fraction(repr(float(number)))) if states else None
        if divisor is not None and divisor not in divisors:
            divisors.add(divisor)
            total += states
            if total > MAX_DIVISOR:
                return f"multipleOf takes at most {MAX_DIVISOR} in all, got {number[:40]} in addition to others."
    if divisors and (combined or _COMBINING.search(text)):
        common = math.lcm(*(divisor.numerator for divisor in divisors))
        shared = math.gcd(*(divisor.denominator for divisor in divisors))
        states = next(scaled for k in range(400) if (scaled := common * 10**k) % shared == 0) // shared
        if states > MAX_DIVISOR:
            return (
                f"multipleOf takes at most {MAX_DIVISOR} for the least common multiple of all its values in combined"
                f" schemas, got {states if states < 10**20 else 'much more'}."
            )
    return None


def _states(number: str) -> int:
    """Return the number of remainders of a divisor: its digits without the point; 0 if it is no number."""
    try:
        value = Decimal(repr(abs(float(number)))).normalize()  # as the compiler reads it
    except ValueError:
        return 0
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or exponent > 10:  # infinite or nearly so
        return MAX_DIVISOR + 1
    return int("".join(map(str, digits)) + "0" * exponent)
