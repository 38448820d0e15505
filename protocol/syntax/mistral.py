"""Mistral's syntax: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``.

The newer form may carry ``[CALL_ID]...`` after the name; ids are ours, so it is read over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from functools import partial

from protocol.syntax.call_reader import Block, BlockReader, BlockState, CallSink, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag
from protocol.syntax.json_calls import CallObject
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.message_parts import ToolReader
from protocol.syntax.reasoning import SpecialTags, find_tag

OPENING = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
TAGS = (OPENING, CALL_ID, ARGUMENTS)
END_TOKENS = ("</s>",)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_HEAD = 256  # characters of name and id


def new_reader(new_call_id: NewCallId, names: Container[str], tags: SpecialTags) -> ToolReader:
    """Reads one choice. A function that was not offered is still a call, since it is plainly meant as one."""
    return BlockReader(partial(_Calls, tags), new_call_id, opening=tags.stand_in(OPENING))


def tag(name: str, schema: JsonSchema) -> Tag:
    """A call as a grammar writes it: the old form, which all versions of the family read."""
    return Tag(f'{OPENING}[{{"name": {json.dumps(name)}, "arguments": ', schema, "}]")


class _Calls:
    """What follows the opening tag: an array of calls, or the name of one."""

    def __init__(self, tags: SpecialTags, sink: CallSink) -> None:
        self.state = BlockState.MORE
        self._tags = tags
        self._sink = sink
        self._block: Block | None = None

    def step(self, text: str) -> int:
        start = text
        if self._block is None:
            start = text.lstrip()
            if not start:
                return len(text)
            self._block = _CallArray(self._sink) if start[0] == "[" else _NamedCall(self._tags, self._sink)
        size = self._block.step(start)
        self.state = self._block.state
        return len(text) - len(start) + size


class _CallArray:
    def __init__(self, sink: CallSink) -> None:
        self.state = BlockState.MORE
        self._sink = sink
        self._call: CallObject | None = None
        self._expects = "["

    def step(self, text: str) -> int:
        if self._call is not None:
            return self._in_call(self._call, text)
        start = text.lstrip()
        size = len(text) - len(start)
        if not start:
            return size
        if start[0] not in self._expects:
            self.state = BlockState.BROKEN
            return size
        match start[0]:
            case "{":
                self._call = CallObject(self._sink)
                return size + self._in_call(self._call, start)
            case "]":
                self.state = BlockState.DONE
            case "[":
                self._expects = "{]"
            case _:
                self._expects = "{"
        return size + 1

    def _in_call(self, call: CallObject, text: str) -> int:
        size = call.step(text)
        if call.state is BlockState.DONE:
            self._call, self._expects = None, ",]"
        elif call.state is BlockState.BROKEN:
            self.state = BlockState.BROKEN
        return size


class _NamedCall:
    def __init__(self, tags: SpecialTags, sink: CallSink) -> None:
        self.state = BlockState.MORE
        self._call_id, self._arguments_tag = tags.stand_in(CALL_ID), tags.stand_in(ARGUMENTS)
        self._sink = sink
        self._scanner: JsonScanner | None = None

    def step(self, text: str) -> int:
        return self._head(text) if self._scanner is None else self._arguments(text, self._scanner)

    def _head(self, text: str) -> int:
        found = find_tag(text, ["{"])
        if found is None:
            if len(text) > _MAX_HEAD:
                self.state = BlockState.BROKEN
            return 0
        head = text[: found[0]]
        name = head.partition(self._call_id)[0].partition(self._arguments_tag)[0].strip()
        if len(head) > _MAX_HEAD or not _NAME.fullmatch(name):
            self.state = BlockState.BROKEN
            return 0
        self._sink.start(name)
        self._scanner = JsonScanner()
        return found[0]

    def _arguments(self, text: str, scanner: JsonScanner) -> int:
        end = scanner.scan(text)
        self._sink.arguments(text[:end])
        if scanner.is_done:
            self._sink.end_arguments()
            self._sink.end()
            self.state = BlockState.DONE
        elif scanner.is_broken:
            self.state = BlockState.BROKEN
        return end
