"""The text of one choice as the parts of a message: reasoning, content, tool calls.

    parser = message_format.parser(token_bytes)     # one for each choice
    for output in outputs:                          # RequestOutput by RequestOutput
        for part in parser.read(output):
            match part: ...                         # each dialect spells the parts in its own way

1. The pieces in which text arrives do not matter: joining neighbours of one kind (`join`) gives the same parts.
2. A call's start comes before its arguments, calls are numbered from 0, and one call ends before the next begins.
3. Arguments are JSON as the model wrote it; text that is not JSON is content, not lost. A call with incomplete or wrong
   arguments is in `MessageParser.cut_calls`, and no dialect may report it as finished.
4. Text goes out as soon as it is decided; only text that may become a tag is held back, with white space before it.

A choice without reasoning and tools needs no parser: see `MessageFormat.is_plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.messages import RequestOutput
from protocol.syntax.reasoning import (
    NO_SPECIAL_TAGS,
    ReasoningCounter,
    ReasoningSplitter,
    ReasoningTags,
    SpecialTagReader,
    SpecialTags,
)

TokenBytes = Callable[[int], bytes]
"""Returns the bytes of a token id, which need not be whole characters."""


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer; with `is_preamble`, of a message that says what the model will do next."""

    text: str
    is_preamble: bool = False


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a tool call. `index` counts the calls of the message from 0."""

    index: int
    call_id: str
    name: str
    is_custom: bool = False  # with free text instead of arguments


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


class ToolCallInput(msgspec.Struct, frozen=True, gc=False):
    """More of the free text of a custom call."""

    index: int
    fragment: str


MessagePart = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallInput


class ToolReader(Protocol):
    """Finds the tool calls in the text of one choice without its reasoning, or all parts in the whole text."""

    def feed_text(self, text: str) -> list[MessagePart]:
        """Return the parts that are decided by `text`."""

    def finish_text(self) -> list[MessagePart]:
        """Return the parts that were held back, at the end of the text."""

    @property
    def cut_calls(self) -> Set[int]:
        """The indices of calls without complete JSON arguments so far."""


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """The way to read the text of one request's choices.

    `reasoning_is_open` is true if the prompt has opened the reasoning. Without `show_reasoning` it is dropped, without
    `new_tool_reader` the text has no calls. `call_is_demanded`: a grammar allows nothing but calls, so a call that has
    only begun when the text ends is left out. `call_is_named`: the client asked for this call, so chat does not report
    it as the model's decision. `special_tags` are the tags that are special tokens. `between_messages` is the text
    between the messages of an answer, if `new_tool_reader` finds the reasoning itself.
    """

    reasoning: ReasoningTags | None = None
    reasoning_is_open: bool = False
    show_reasoning: bool = True
    new_tool_reader: Callable[[], ToolReader] | None = None
    call_is_demanded: bool = False
    call_is_named: bool = False
    special_tags: SpecialTags = NO_SPECIAL_TAGS
    between_messages: str = ""

    @property
    def is_plain(self) -> bool:
        """True if all text is content, so that no parser is needed."""
        return self.reasoning is None and self.new_tool_reader is None

    def parser(self, token_bytes: TokenBytes) -> MessageParser:
        """Return a parser for one choice. `token_bytes` serves to count the tokens of the reasoning."""
        return MessageParser(self, token_bytes)


class MessageParser:
    """Turns the outputs of one choice, in order, into the parts of its message."""

    def __init__(self, message_format: MessageFormat, token_bytes: TokenBytes) -> None:
        self.message_format = message_format
        self.num_tool_calls = 0
        self._shows_reasoning = message_format.show_reasoning
        self._splitter: ReasoningSplitter | None = None
        self._counter: ReasoningCounter | None = None
        special, is_open = message_format.special_tags, message_format.reasoning_is_open
        self._special = SpecialTagReader(special) if special else None
        if message_format.reasoning:
            tags = ReasoningTags(*map(special.stand_in, message_format.reasoning))
            between = special.stand_in(message_format.between_messages)
            self._splitter = None if between else ReasoningSplitter(tags, is_open=is_open)
            self._counter = ReasoningCounter(tags, token_bytes, special, is_open=is_open, between=between)
        self._tools = message_format.new_tool_reader() if message_format.new_tool_reader else None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far, tags included; None if the format has no reasoning."""
        return None if self._counter is None else self._counter.num_tokens

    @property
    def cut_calls(self) -> Set[int]:
        """The indices of the calls without complete JSON arguments: no client may run them."""
        return frozenset() if self._tools is None else self._tools.cut_calls

    def read(self, output: RequestOutput) -> list[MessagePart]:
        """Return the parts that `output` decides: all that are left, if it ends the choice."""
        if self._counter is not None:
            self._counter.count(output.token_ids)
        parts = self.feed_text(output.text) if output.text else []
        return parts if output.finish_reason is None else parts + self.finish_text()

    def feed_text(self, text: str) -> list[MessagePart]:
        if self._special is None:
            return self._parts(text)
        return self._spelled(self._parts(self._special.feed_text(text)))

    def finish_text(self) -> list[MessagePart]:
        if self._special is None:
            return self._last_parts()
        return self._spelled(self._parts(self._special.finish_text()) + self._last_parts())

    def _parts(self, text: str) -> list[MessagePart]:
        if self._splitter is None:
            return self._answer(text)
        reasoning, answer = self._splitter.feed_text(text)
        return self._reasoning(reasoning) + self._answer(answer)

    def _last_parts(self) -> list[MessagePart]:
        parts: list[MessagePart] = []
        if self._splitter is not None:
            reasoning, answer = self._splitter.finish_text()
            parts = self._reasoning(reasoning) + self._answer(answer)
        if self._tools is not None:
            parts += self._count(self._tools.finish_text())
        if self.message_format.call_is_demanded:
            parts = [part for part in parts if not isinstance(part, ContentDelta)]
        return parts

    def _reasoning(self, text: str) -> list[MessagePart]:
        return [ReasoningDelta(text)] if text and self._shows_reasoning else []

    def _answer(self, text: str) -> list[MessagePart]:
        if not text:
            return []
        return [ContentDelta(text)] if self._tools is None else self._count(self._tools.feed_text(text))

    def _spelled(self, parts: list[MessagePart]) -> list[MessagePart]:
        """Return the parts with tags, or nothing, in place of stand-in characters. Parts without text are dropped."""
        spell = self.message_format.special_tags.spelled
        spelled: list[MessagePart] = []
        for part in parts:
            match part:
                case ReasoningDelta(text) | ContentDelta(text) if text := spell(text):
                    spelled.append(msgspec.structs.replace(part, text=text))
                case ToolCallArguments(index, text) | ToolCallInput(index, text):
                    spelled.append(type(part)(index, spell(text)))
                case ToolCallStart():
                    spelled.append(part)
        return spelled

    def _count(self, parts: list[MessagePart]) -> list[MessagePart]:
        self.num_tool_calls += sum(isinstance(part, ToolCallStart) for part in parts)
        return parts if self._shows_reasoning else [part for part in parts if not isinstance(part, ReasoningDelta)]


def join(parts: Iterable[MessagePart]) -> list[MessagePart]:
    joined: list[MessagePart] = []
    for part in parts:
        match (joined[-1] if joined else None), part:
            case ReasoningDelta(before), ReasoningDelta(text):
                joined[-1] = ReasoningDelta(before + text)
            case ContentDelta(before, kind), ContentDelta(text, same) if kind == same:
                joined[-1] = ContentDelta(before + text, kind)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                joined[-1] = ToolCallArguments(index, before + text)
            case ToolCallInput(index, before), ToolCallInput(same, text) if index == same:
                joined[-1] = ToolCallInput(index, before + text)
            case _:
                joined.append(part)
    return joined
