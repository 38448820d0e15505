"""The end of one JSON value in text that arrives in pieces, and the place where it stops being JSON.

A pushdown automaton over RFC 8259's grammar. It reads every character once and keeps only the open brackets, so the
text of the value can be passed on at once.
"""

from __future__ import annotations

import enum
import re

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # in a string
_LITERAL = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = frozenset({"true", "false", "null"})
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{0,4})")  # perhaps incomplete
MAX_DEPTH = 256
"""The deepest nesting of brackets that is accepted. Common parsers refuse more."""


class _Expect(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # after [
    KEY_OR_END = enum.auto()  # after {
    KEY = enum.auto()  # after a comma in an object
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()  # in a string
    ESCAPE = enum.auto()  # after its backslash
    LITERAL = enum.auto()  # in a number, true, false or null
    DONE = enum.auto()
    BROKEN = enum.auto()


class JsonScanner:
    """Scans one value and the white space before it."""

    __slots__ = ("_escape", "_expect", "_literal", "_open", "_string_is_key")

    def __init__(self) -> None:
        self._expect = _Expect.VALUE
        self._open: list[str] = []  # the brackets that have to be closed
        self._string_is_key = False
        self._escape = "\\"  # the part of an escape that was read
        self._literal: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._expect is _Expect.DONE

    @property
    def is_broken(self) -> bool:
        """True once no continuation of the text is a JSON value, or it is nested too deep."""
        return self._expect is _Expect.BROKEN

    def scan(self, text: str, start: int = 0) -> int:
        """Scan `text` from `start`. Return where the value ends or breaks in it, or `len(text)`."""
        position = start
        while position < len(text) and self._expect not in (_Expect.DONE, _Expect.BROKEN):
            match self._expect:
                case _Expect.STRING:
                    position = self._in_string(text, position)
                case _Expect.ESCAPE:
                    position = self._after_backslash(text, position)
                case _Expect.LITERAL:
                    position = self._in_literal(text, position)
                case _:
                    position = self._between(text, position)
        return position

    def _in_string(self, text: str, position: int) -> int:
        if plain := _PLAIN.match(text, position):
            position = plain.end()
            if position == len(text):
                return position
        match text[position]:
            case '"':
                if self._string_is_key:
                    self._expect = _Expect.COLON
                else:
                    self._end_value()
            case "\\":
                self._expect = _Expect.ESCAPE
            case _:  # a control character
                return self._break(position)
        return position + 1

    def _after_backslash(self, text: str, position: int) -> int:
        self._escape += text[position]
        if not _ESCAPE.fullmatch(self._escape):
            return self._break(position)
        if len(self._escape) == (6 if self._escape[1] == "u" else 2):
            self._expect, self._escape = _Expect.STRING, "\\"
        return position + 1

    def _in_literal(self, text: str, position: int) -> int:
        if more := _LITERAL.match(text, position):
            self._literal.append(more[0])
            return more.end()
        literal = "".join(self._literal)
        if literal not in _WORDS and not _NUMBER.fullmatch(literal):
            return self._break(position)
        self._end_value()
        return position

    def _between(self, text: str, position: int) -> int:
        space = _SPACE.match(text, position)
        position = space.end() if space else position
        if position == len(text):
            return position
        match self._expect, text[position]:
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END, ",":
                self._expect = _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE
            case ((_Expect.COMMA_OR_END | _Expect.KEY_OR_END | _Expect.VALUE_OR_END), bracket) if (
                bracket == self._open[-1]
            ):
                self._open.pop()
                self._end_value()
            case ((_Expect.KEY | _Expect.KEY_OR_END), '"'):
                self._expect, self._string_is_key = _Expect.STRING, True
            case ((_Expect.VALUE | _Expect.VALUE_OR_END), character):
                return self._begin_value(character, position)
            case _:
                return self._break(position)
        return position + 1

    def _begin_value(self, character: str, position: int) -> int:
        if character in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append("}" if character == "{" else "]")
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
        elif character == '"':
            self._expect, self._string_is_key = _Expect.STRING, False
        elif character in "-0123456789tfn":
            self._expect, self._literal = _Expect.LITERAL, []
            return position
        else:
            return self._break(position)
        return position + 1

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END if self._open else _Expect.DONE

    def _break(self, position: int) -> int:
        self._expect = _Expect.BROKEN
        return position
