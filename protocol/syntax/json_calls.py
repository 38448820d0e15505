"""One call written as a JSON object: ``{"name": "f", "arguments": {...}}``, as most families do.

The arguments are passed on while they are written. They may also be called ``parameters`` (Llama), may be a string
that holds the JSON (OpenAI's own form), and may come before the name, in which case they wait for it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Container

from protocol.syntax.call_reader import BlockState, CallSink
from protocol.syntax.json_scanner import JsonScanner

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "id"})  # seen in the wild, read over
_SPACE = re.compile(r"[ \t\n\r]*")
MAX_KEY = 64
"""Characters of a key, or of a value that is read over, in JSON."""
MAX_NAME = 512
"""Characters of a name in JSON."""


class _Expect(enum.Enum):
    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class CallObject:
    """Reads one call from its opening brace to its closing one. Ready for use as a part of a `Block`.

    `names` are the functions that may be called; None allows any. An object that is no call breaks at the first
    character that shows it.
    """

    def __init__(self, sink: CallSink, names: Container[str] | None = None) -> None:
        self.state = BlockState.MORE
        self._sink = sink
        self._names = names
        self._expect = _Expect.OPENING
        self._key: str | None = None  # None while a key is read
        self._name: str | None = None
        self._has_arguments = False
        self._scanner: JsonScanner | None = None
        self._read: list[str] = []  # of the key or value that is being scanned, or arguments that wait for the name
        self._waiting = ""
        self._num_read = 0

    def step(self, text: str) -> int:
        """Read `text` at most to the end of a key, a value or the call. Return the number of characters read."""
        position = 0
        while self.state is BlockState.MORE:
            if self._scanner is None:
                space = _SPACE.match(text, position)
                position = space.end() if space else position
            if position == len(text):
                break
            if self._scanner is not None:
                return self._scan(text, position)
            position = self._punctuation(text, position)
        return position

    def _punctuation(self, text: str, position: int) -> int:
        match self._expect, text[position]:
            case _Expect.OPENING, "{":
                self._expect = _Expect.KEY
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END, ",":
                self._expect = _Expect.KEY
            case _Expect.COMMA_OR_END, "}":
                self._end()
                return position + (self.state is BlockState.DONE)
            case _Expect.KEY, '"':
                self._begin(None)
                return position
            case _Expect.VALUE, character if self._value_may_begin_with(character):
                self._begin(self._key)
                return position
            case _:
                self.state = BlockState.BROKEN
                return position
        return position + 1

    def _value_may_begin_with(self, character: str) -> bool:
        if self._key in _ARGUMENTS:
            return character in '{"' and not self._has_arguments and not self._waiting
        return character == '"' if self._key == "name" else character not in "{["

    def _begin(self, key: str | None) -> None:
        self._key = key
        self._scanner = JsonScanner()
        self._read = []
        self._num_read = 0

    def _scan(self, text: str, position: int) -> int:
        scanner = self._scanner
        assert scanner is not None
        end = scanner.scan(text, position)
        piece = text[position:end]
        is_streamed = self._key in _ARGUMENTS and (self._read[:1] or [piece])[0][:1] == "{"
        if is_streamed and self._name is not None:
            if not self._has_arguments:
                self._has_arguments = True
                self._sink.start(self._name)
            self._read = ["{"]  # what the value began with is all that has to be remembered
            self._sink.arguments(piece)
        else:
            limit = MAX_NAME if self._key == "name" else MAX_KEY
            if self._key not in _ARGUMENTS and self._num_read + len(piece) > limit:
                self.state = BlockState.BROKEN
                return position + limit - self._num_read
            self._read.append(piece)
            self._num_read += len(piece)
        if scanner.is_broken:
            self.state = BlockState.BROKEN
        elif scanner.is_done:
            self._scanner = None
            self._end_scan()
        return end

    def _end_scan(self) -> None:
        key, value = self._key, "".join(self._read)
        if key is None:
            self._key = json.loads(value)
            self._expect = _Expect.COLON
            if self._key != "name" and self._key not in _ARGUMENTS and self._key not in _OTHERS:
                self.state = BlockState.BROKEN
            return
        self._expect = _Expect.COMMA_OR_END
        if key == "name":
            self._name = self._name or _unquoted(value)
            if not self._name or (self._names is not None and self._name not in self._names):
                self.state = BlockState.BROKEN
            elif self._waiting:
                self._give(self._waiting)
        elif key in _ARGUMENTS and self._has_arguments:
            self._sink.end_arguments()
        elif key in _ARGUMENTS:
            if value.startswith('"') and not _is_object(value := _unquoted(value)):
                self.state = BlockState.BROKEN
            elif self._name is None:
                self._waiting = value
            else:
                self._give(value)

    def _give(self, arguments: str) -> None:
        assert self._name is not None
        self._has_arguments = True
        self._sink.start(self._name)
        self._sink.arguments(arguments)
        self._sink.end_arguments()

    def _end(self) -> None:
        if self._name is None:
            self.state = BlockState.BROKEN
            return
        if not self._has_arguments:
            self._give("{}")
        self._sink.end()
        self.state = BlockState.DONE


def _unquoted(literal: str) -> str:
    """The text of a JSON string; empty if it holds half a character, which no JSON can carry further."""
    text: str = json.loads(literal)
    return "" if any("\ud800" <= character <= "\udfff" for character in text) else text


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    return text[:1] == "{" and scanner.scan(text) == len(text) and scanner.is_done
