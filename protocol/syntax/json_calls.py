"""Calls written as JSON: one object, an array of objects, or a name and the JSON of its arguments, between tags or not.

An object is ``{"name": "f", "arguments": {...}}``. Its arguments may also be called ``parameters`` (Llama), may be a
string that holds the JSON (OpenAI's own form), and may come before the name. They are held until the name is known, and
then passed on while they are written.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Container

from protocol.syntax.call_reader import Block, BlockState, CallSink
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.reasoning import SpecialTags, find_tag
from protocol.syntax.record import Reading

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "id"})  # keys that some models write; ignored
_SPACE = re.compile(r"[ \t\n\r]*")
MAX_KEY = 64
"""Characters of a key, or of a value that is read over, in JSON."""
MAX_NAME = 512
"""Characters of a name in JSON."""


class _Next(enum.Enum):
    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class CallObject:
    """A `Block` of one call, from its opening brace to its closing one.

    `names` are the functions that may be called; None allows any, offered or not. The block breaks at the first
    character that cannot belong to a call.
    """

    def __init__(self, sink: CallSink, names: Container[str] | None = None) -> None:
        self.state = BlockState.MORE
        self._sink = sink
        self._names = names
        self._expect = _Next.OPENING
        self._key: str | None = None  # None while a key is read
        self._name: str | None = None
        self._has_arguments = False
        self._scanner: JsonScanner | None = None
        self._read: list[str] = []  # text of the scanned key or value, or arguments that wait for the name
        self._waiting = ""
        self._num_read = 0

    def step(self, text: str) -> int:
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
            case _Next.OPENING, "{":
                self._expect = _Next.KEY
            case _Next.COLON, ":":
                self._expect = _Next.VALUE
            case _Next.COMMA_OR_END, ",":
                self._expect = _Next.KEY
            case _Next.COMMA_OR_END, "}":
                self._end()
                return position + (self.state is BlockState.DONE)
            case _Next.KEY, '"':
                self._begin(None)
                return position
            case _Next.VALUE, character if self._value_may_begin_with(character):
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
            self._read = ["{"]  # of the value only the first character is needed
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
            self._expect = _Next.COLON
            if self._key != "name" and self._key not in _ARGUMENTS and self._key not in _OTHERS:
                self.state = BlockState.BROKEN
            return
        self._expect = _Next.COMMA_OR_END
        if key == "name":
            former, self._name = self._name, _unquoted(value)
            if former or not self._name or (self._names is not None and self._name not in self._names):
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
    """Return the text of a JSON string; empty if it has half a surrogate pair, which cannot be written again."""
    text: str = json.loads(literal)
    return "" if any("\ud800" <= character <= "\udfff" for character in text) else text


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    return text[:1] == "{" and scanner.scan(text) == len(text) and scanner.is_done


# -------------------------------------------------------------------------------------------------------------- mistral
# Mistral's calls: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``, which
# may carry ``[CALL_ID]...`` after the name; the id is skipped because calls get ids of ours.


CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_FUNCTION_NAME = "[A-Za-z0-9_.-]{1,128}"
_MAX_HEAD = 256  # characters of name and id


class CallList:
    """The inside of a Mistral or Granite block: an array of calls, one object, or a name with its arguments."""

    def __init__(self, tags: SpecialTags, sink: CallSink) -> None:
        self.state = BlockState.MORE
        call_id, arguments = re.escape(tags.stand_in(CALL_ID)), re.escape(tags.stand_in(ARGUMENTS))
        self._head = rf"\s*NAME\s*(?:{call_id}\s*\w*\s*)?(?:{arguments}\s*)?"
        self._sink = sink
        self._call: Block | None = None
        self._expects = ""  # the characters that may come next in the array; "" before it

    def step(self, text: str) -> int:
        size = 0
        if self._call is None:
            start = text.lstrip()
            size = len(text) - len(start)
            if not start:
                return size
            if not self._expects and start[0] == "{":
                self._call = CallObject(self._sink)
            elif not self._expects and start[0] != "[":
                self._call = NamedCall(self._head, "", self._sink)
            elif start[0] not in (self._expects or "["):
                self.state = BlockState.BROKEN
                return size
            elif start[0] == "{":
                self._call = CallObject(self._sink)
            else:
                self.state = BlockState.DONE if start[0] == "]" else BlockState.MORE
                self._expects = "{]" if start[0] == "[" else "{"
                return size + 1
            text = start
        size += self._call.step(text)
        if self._call.state is BlockState.DONE and self._expects:
            self._call, self._expects = None, ",]"
        else:
            self.state = self._call.state
        return size


class NamedCall:
    """One call by its name: a head that matches `head`, with the name as a group, and the arguments as JSON.

    If `end` comes instead of arguments, the call has none.
    """

    def __init__(self, head: str, end: str, sink: CallSink) -> None:
        self.state = BlockState.MORE
        self._pattern = re.compile(head.replace("NAME", f"({_FUNCTION_NAME})"))
        self._stops = ["{", *([end] if end else [])]
        self._sink = sink
        self._scanner: JsonScanner | None = None

    def step(self, text: str) -> int:
        return self._head(text) if self._scanner is None else self._arguments(text, self._scanner)

    def _head(self, text: str) -> int:
        found = find_tag(text, self._stops)
        if found is None:
            if len(text) > _MAX_HEAD + len(self._stops[-1]):
                self.state = BlockState.BROKEN
            return 0
        head = self._pattern.fullmatch(text[: found[0]])
        if head is None or found[0] > _MAX_HEAD:
            self.state = BlockState.BROKEN
            return 0
        self._sink.start(next(filter(None, head.groups())))
        self._scanner = JsonScanner()
        if found[1] != "{":
            self._sink.arguments("{}")
            self._scanner.scan("{}")
            self._check(self._scanner)
        return found[0]

    def _arguments(self, text: str, scanner: JsonScanner) -> int:
        end = scanner.scan(text)
        self._sink.arguments(text[:end])
        self._check(scanner)
        return end

    def _check(self, scanner: JsonScanner) -> None:
        if scanner.is_done:
            self._sink.end_arguments()
            self.state = BlockState.DONE
        elif scanner.is_broken:
            self.state = BlockState.BROKEN


# ------------------------------------------------------------------------------------------------------------- sections
# A section of calls, each between tags: DeepSeek's and Kimi's.


class SectionCalls:
    """The inside of a section. The `tags` in order: before a call, within its head, after it, after the section.

    `head` is a regular expression of the text before the arguments, with NAME for the function and TAG for its tag.
    """

    def __init__(self, tags: tuple[str, str, str, str], head: str, reading: Reading, sink: CallSink) -> None:
        self.state = BlockState.MORE
        self._begin, tag, self._end, self._section_end = map(reading.tags.stand_in, tags)
        self._head = head.replace("TAG", re.escape(tag))
        self._sink = sink
        self._call: NamedCall | None = None

    def step(self, text: str) -> int:
        call = self._call
        if call is not None and call.state is not BlockState.DONE:
            size = call.step(text)
            if call.state is BlockState.BROKEN:
                self.state = call.state
            return size
        rest = text.lstrip("` \t\r\n")  # of ```json
        size = len(text) - len(rest)
        expected = [self._end] if call else [self._begin, self._section_end]
        tag = next((each for each in expected if rest.startswith(each)), None)
        if tag is None:
            if not any(each.startswith(rest) for each in expected):
                self.state = BlockState.BROKEN
            return size
        if call:
            self._sink.end()
            self._call = None
        elif tag == self._section_end:
            self.state = BlockState.DONE
        else:
            self._call = NamedCall(self._head, self._end, self._sink)
        return size + len(tag)
