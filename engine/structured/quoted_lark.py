"""A grammar in Lark's notation, turned into one for the same texts as they stand in a JSON string.

Free text of a tool is one string among a call's arguments, so a grammar for it has to hold behind JSON's escapes.
Escaping maps each character by itself, no code is the beginning of another, and a quotation mark is always escaped: so
it is enough to escape every terminal, and the string's end cannot be mistaken.

But the compiler's lexer tells the end of a terminal by one character, and two codes begin alike. So a grammar that
does not refer to itself becomes a single terminal, in which there are no ends to tell; of the others, those are refused
in which an end could be mistaken. So is what says more than which texts there are: tokens by number, other grammars.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

MAX_CHARACTERS = 256 * 1024
MAX_IGNORED = 16

_ESCAPES = {
    character: msgspec.json.encode(character).decode()[1:-1]
    for character in [*map(chr, range(0x20)), '"', "\\"]  # those that JSON takes in no other way
}
_PLAIN = r'[^"\\\x00-\x1F]'
_SHORT = {character: code[1] for character, code in _ESCAPES.items() if len(code) == 2}
_LONG = {character: code[-2:] for character, code in _ESCAPES.items() if len(code) > 2}

# What `%import common.NAME` stands for, where it holds characters that JSON escapes. Others may stay as they are.
_COMMON = {
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "CR": r'"\r"',
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "LF": r'"\n"',
    "NEWLINE": r"/(\r?\n)+/",
    "SH_COMMENT": r"/#[^\n]*/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
}
_COMMON_PLAIN = frozenset(
    (
        *("CNAME", "DECIMAL", "DIGIT", "EXP", "FLOAT", "HEXDIGIT", "INT", "LCASE_LETTER", "LETTER", "NUMBER"),
        *("SIGNED_FLOAT", "SIGNED_INT", "SIGNED_NUMBER", "UCASE_LETTER", "WORD", "_EXP"),
    )
)

_ALL_LONG = "0[0-7bef]|1[0-9a-f]"
_CODE_OF_ANY = rf'\\(?:["\\bfnrt]|u00(?:{_ALL_LONG}))'

_TOKEN = re.compile(
    r"""
    (?P<comment> (?: \# | // ) [^\n]* | -> [ \t]* \w+ )
  | (?P<string> "(?: \\. | [^"\\\n] )*+" ) (?P<string_flags> i? )
  | / (?P<regex> (?: \\. | [^/\\\n] )++ ) / (?P<regex_flags> [imslux]* )
  | (?P<unclosed> ["/] .* )
  | %import [ \t]+ common (?: \.(?P<imported> \w+ ) (?: [ \t]* -> [ \t]* (?P<alias> \w+ ) )?
        | [ \t]* \( (?P<several> [\w \t,]* ) \) )
  | (?P<refused> % (?!ignore\b) \w* | <[^\s<>]+> | @\w* | & | ~ (?! [ \t]* [0-9] )
        | \w\[ [^\]\n]{0,100} \] [ \t]* : )
    """,
    re.VERBOSE,
)
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


_DEFINITION = re.compile(r"^[ \t]*[!?]*(?P<name>\w+)[ \t]*:", re.MULTILINE)
_NAME = re.compile(
    r"""
    (?P<string> "(?: \\. | [^"\\\n] )*" i? )
  | (?P<regex> / (?: \\. | [^/\\\n] )+ / [imslux]* )
  | (?P<mark> [?!] (?= \w+ [ \t]* : ) )
  | (?P<import> %import .* )
  | (?P<name> \b[A-Za-z_]\w* )
""",
    re.VERBOSE,
)
_IGNORE = re.compile(r"^[ \t]*%ignore\b[^\n]*", re.MULTILINE)
_CODES = r"\(\?-i:\\\\\(\?:[^()]*(?:\(\?:[^()]*\))?\)\)"  # as `_one_character` writes them
_ONE_CODE = re.compile(rf"/(?P<one>{_CODES}|\(\?:[^()]*\|{_CODES}\))(?P<repeat>[+*]?)/")
_MISTAKEN = (
    "a regular expression for several characters of which JSON escapes some, such as line breaks, cannot be enforced in"
    " a grammar that refers to itself or ignores text"
)
ANY_QUOTED = rf"start: /(?:{_PLAIN}|{_CODE_OF_ANY})*/"
"""For any text."""


_IN_LITERAL = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # of Lark's regular expressions


class NotQuotable(ValueError):
    """The grammar says something that has no place in a JSON string. The message says what, in words for a client."""


def quoted_lark(text: str) -> str:
    """The grammar for what `text` describes as it stands between a JSON string's quotation marks.

    Raises `NotQuotable`. What is no Lark at all is left for the compiler to refuse.
    """
    definitions: list[str] = []
    quoted = _TOKEN.sub(lambda found: _token(found, definitions.append), text)
    quoted = "\n".join([quoted, *definitions])
    if len(quoted) > MAX_CHARACTERS or len(_IGNORE.findall(quoted)) > MAX_IGNORED:
        raise NotQuotable("the grammar of a tool's input is too long with JSON's escapes, or ignores too much")
    if _IGNORE.search(quoted) is None and not _refers_to_itself(quoted):
        return f"start: RULE_START\n{_NAME.sub(_as_terminal, quoted)}"
    quoted = _ignoring_one_by_one(quoted)
    for found in _NAME.finditer(quoted):
        if found["regex"] and "(?-i:" in found["regex"]:
            one = _ONE_CODE.fullmatch(found["regex"])
            if one is None or one["repeat"]:
                raise NotQuotable(_MISTAKEN)
    return quoted


def quoted_regex(pattern: str) -> str:
    """The grammar for what a regular expression describes. Raises `NotQuotable`."""
    literal = re.sub(r"\\.|/|\n", lambda found: _IN_LITERAL.get(found[0], found[0]), pattern, flags=re.DOTALL)
    ascii_digits = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\.", _with_ascii_digits, literal, flags=re.DOTALL)
    return f"start: /{_regex(ascii_digits, '')}/"


def _with_ascii_digits(found: re.Match[str]) -> str:
    """A set, or an escape, with the digits that JSON Schema's patterns mean."""
    if found[0] == r"\d":
        return "[0-9]"
    if found[0].startswith("["):
        return re.sub(r"\\(.)", lambda each: "0-9" if each[1] == "d" else each[0], found[0], flags=re.DOTALL)
    return found[0]


def _ignoring_one_by_one(text: str) -> str:
    """What is ignored is ignored again and again, so one character at a time is as good as many."""
    for name in re.findall(r"^[ \t]*%ignore[ \t]+(\w+)[ \t]*$", text, re.MULTILINE):
        definition = re.search(rf"^[ \t]*{name}[ \t]*:[ \t]*(/.+/)[ \t]*$", text, re.MULTILINE)
        if definition is not None and sum(found["name"] == name for found in _NAME.finditer(text)) == 2:
            text = text.replace(definition[0], "")
            text = re.sub(rf"(?<=%ignore)[ \t]+{name}\b", f" {definition[1]}".replace("\\", r"\\"), text)
    return _IGNORE.sub(lambda line: _ONE_CODE.sub(lambda found: f"/{found['one']}/", line[0]), text)


def _refers_to_itself(text: str) -> bool:
    heads = list(_DEFINITION.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    used: dict[str, set[str]] = {}
    for head, end in zip(heads, ends, strict=False):
        names = {found["name"] for found in _NAME.finditer(text, head.end(), end) if found["name"]}
        used.setdefault(head["name"], set()).update(names)
    while done := [name for name, names in used.items() if not names & used.keys()]:
        for name in done:
            del used[name]
    return bool(used)


def _as_terminal(found: re.Match[str]) -> str:
    if found["mark"]:
        return ""
    name = found["name"]
    return f"RULE_{name.upper()}" if name and name.islower() else found[0]


def _token(found: re.Match[str], define: Callable[[str], None]) -> str:
    if found["comment"] is not None:
        return " "
    if found["string"] is not None:
        return _string(found["string"], found["string_flags"])
    if found["regex"] is not None:
        return f"/{_regex(found['regex'], found['regex_flags'])}/{found['regex_flags']}"
    if found["unclosed"] is not None:
        raise NotQuotable("a string or regular expression in the grammar of a tool's input has no end")
    if found["refused"] is not None:
        raise NotQuotable(f"{found['refused'][:20]} has no place in the grammar of a tool's input")
    kept = []
    names = [found["imported"]] if found["imported"] else re.findall(r"\w+", found["several"])
    for name in names:
        if name in _COMMON:
            define(f"{found['alias'] or name}: {_TOKEN.sub(lambda each: _token(each, define), _COMMON[name])}")
        elif name in _COMMON_PLAIN:
            kept.append(f"%import common.{name}" + (f" -> {found['alias']}" if found["alias"] else ""))
        else:
            raise NotQuotable(f"common.{name[:40]} is not known in the grammar of a tool's input")
    return "\n".join(kept)


def _string(literal: str, flags: str) -> str:
    try:
        as_json = re.sub(r"\\(\\)|\\x(..)", lambda found: found[0] if found[1] else rf"\u00{found[2]}", literal)
        text = msgspec.json.decode(as_json, type=str)
    except msgspec.DecodeError:
        return literal + flags  # the compiler says what is wrong with it
    if not flags:
        return _literal(_escaped(text))
    # Letters of either case are meant; the letters of an escape are not.
    parts = [part for part in re.split(r'(["\\\x00-\x1f])', text) if part]
    written = [_literal(_ESCAPES[part]) if part in _ESCAPES else _literal(part) + flags for part in parts]
    return f"({' '.join(written)})" if written else literal


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _regex(pattern: str, flags: str) -> str:
    if "x" in flags:
        raise NotQuotable("the flag x has no place in the grammar of a tool's input")
    return "".join(_atoms(pattern, flags))


def _atoms(pattern: str, flags: str) -> Iterator[str]:
    position = 0
    while position < len(pattern):
        found = _REGEX_ATOM.match(pattern, position)
        if found is None:
            raise NotQuotable(f"{pattern[position : position + 8]!r} in a regular expression cannot be enforced there")
        position = found.end()
        atom = found[0]
        if found["group"] and re.search(r"\?[^:<]*[sx]|\?[=!]", atom):
            raise NotQuotable(f"{atom[:20]} in a regular expression cannot be enforced there")
        if found["set"] or found["one"]:
            is_repeated = pattern[position : position + 1] in ("*", "+", "?", "{")
            # A code of two characters has to be repeated as one.
            yield _one_character(f"\\{atom}" if is_repeated and atom in _ESCAPES else atom, flags)
        else:
            yield atom


@lru_cache(maxsize=256)
def _one_character(atom: str, flags: str) -> str:
    """What matches one character, for its code."""
    if atom.startswith(r"\p"):  # letters, marks and numbers
        return atom
    if atom in _ESCAPES or (len(atom) == 1 and atom != "."):
        return re.escape(_ESCAPES[atom]) if atom in _ESCAPES else atom
    if atom[0] == "[" and re.search(r"\[|&&|--|~~|\\[pPbBuUxzZA](?![0-9A-Fa-f])", atom[1:]):
        raise NotQuotable(f"{atom[:20]} in a regular expression cannot be enforced there")
    try:
        matches = re.compile(atom, re.ASCII | (re.DOTALL if "s" in flags else 0)).fullmatch
    except re.error:
        raise NotQuotable(f"{atom[:20]} in a regular expression cannot be enforced there") from None
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
        return escaped  # one character and no more
    plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
    return f"(?:{plain}|{escaped})"
