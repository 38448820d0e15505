"""Prose around blocks of calls, and the free text of custom tools.

`BlockReader` separates prose from blocks; the family's `Block` reads what is inside. A block ends after its last call,
or breaks where its text stops being a call. Its text outside of calls is then content, tags included.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Container, Iterable, Set
from typing import Protocol

import orjson

from protocol.syntax import message_parts
from protocol.syntax.reasoning import Padding, find_tag, unfinished_tag
from protocol.tools.kinds import INPUT

NewCallId = Callable[[str, int], str]
"""Returns the id of a call of this function, the n-th call of the message from 0."""

_SPACE = " \t\r\n"
_BETWEEN_CALLS = _SPACE + ",;[]"  # text without meaning


class CallSink:
    """Numbers the calls of blocks and gives them ids. One call at a time."""

    def __init__(self, new_call_id: NewCallId) -> None:
        self.parts: list[message_parts.MessagePart] = []
        self.is_open = False
        self.num_calls = 0
        self.cut_calls: set[int] = set()
        self._new_call_id = new_call_id

    def start(self, name: str) -> None:
        """Emit the start of a call; it cannot be retracted."""
        self.parts.append(message_parts.ToolCallStart(self.num_calls, self._new_call_id(name, self.num_calls), name))
        self.cut_calls.add(self.num_calls)
        self.num_calls += 1
        self.is_open = True

    def arguments(self, fragment: str) -> None:
        if fragment:
            self.parts.append(message_parts.ToolCallArguments(self.num_calls - 1, fragment))

    def cut(self, rest: str) -> None:
        """Emit `rest`, which was held back, as arguments of a call that the end of the text has cut."""
        if self.num_calls - 1 in self.cut_calls:
            self.arguments(rest)

    def end_arguments(self) -> None:
        self.cut_calls.discard(self.num_calls - 1)

    def end(self) -> None:
        self.is_open = False


class BlockState(enum.Enum):
    """The state of a block after a step."""

    MORE = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class Block(Protocol):
    """The text of one block after its opening tag."""

    state: BlockState

    def step(self, text: str) -> int:
        """Read `text`, at most to the end of a call or of its arguments.

        Return the number of characters read; 0 if more text is needed.
        """


class BlockReader:
    """A `ToolReader` of the text of one choice.

    `opening` begins a block, `closing` is dropped after one. With `bare`, a block may also begin by this character, at
    the start of the text or right after another block; `separators` are dropped in between.
    """

    def __init__(
        self,
        new_block: Callable[[CallSink], Block],
        new_call_id: NewCallId,
        *,
        opening: str,
        closing: str | None = None,
        bare: str | None = None,
        separators: str = "",
    ) -> None:
        self._new_block = new_block
        self._sink = CallSink(new_call_id)
        self._opening = opening
        self._closing = closing
        self._bare = bare
        self._separators = _SPACE + separators
        self._block: Block | None = None
        self._raw: list[str] = []  # text of the block outside calls
        self._held = ""
        self._padding = Padding()
        self._may_begin_bare = bare is not None
        self._is_after_block = False  # only dropped text has followed the last block
        self._awaits_closing = False

    def feed_text(self, text: str) -> list[message_parts.MessagePart]:
        self._held += text
        while self._held and (self._in_prose() if self._block is None else self._in_block(self._block)):
            pass
        return self._take()

    def finish_text(self) -> list[message_parts.MessagePart]:
        held, self._held = self._held, ""
        if self._block is None:
            if not (held and self._awaits_closing and (self._closing or "").startswith(held)):
                self._say(self._padding.take() + held)
        elif not self._sink.is_open:
            self._raw.append(held)
            self._give_back()
            self._say(self._padding.take())
        else:
            self._sink.cut(held.strip())
        return self._take()

    @property
    def cut_calls(self) -> Set[int]:
        return self._sink.cut_calls

    def _in_prose(self) -> bool:
        """Read text outside of a block. Return True if more can be read."""
        text = self._held
        if self._is_after_block:
            text = self._held = text.lstrip(self._separators)
        if self._may_begin_bare:
            start = text.lstrip()
            if not start:
                return False
            if start[0] == self._bare:
                self._open_block(text[: len(text) - len(start)], start)
                return True
        if not text:
            return False
        tags = (self._opening, *((self._closing,) if self._awaits_closing and self._closing else ()))
        found = find_tag(text, tags)
        if found is None:
            length = unfinished_tag(text, tags)
            self._prose(text[: len(text) - length])
            self._held = text[len(text) - length :]
            return False
        position, tag = found
        self._prose(text[:position])
        rest = text[position + len(tag) :]
        if tag == self._opening:
            self._open_block(self._padding.take() + tag, rest)
        else:
            self._held = rest
            self._awaits_closing, self._is_after_block = False, True
        return True

    def _prose(self, text: str) -> None:
        if text:
            self._may_begin_bare = self._is_after_block = False
            self._say(self._padding.hold_back(text))

    def _open_block(self, raw: str, rest: str) -> None:
        self._block = self._new_block(self._sink)
        self._raw = [raw]
        self._held = rest
        self._may_begin_bare = self._is_after_block = self._awaits_closing = False

    def _in_block(self, block: Block) -> bool:
        """Read text inside of a block. Return True if more can be read."""
        num_parts, was_open = len(self._sink.parts), self._sink.is_open
        size = block.step(self._held)
        read, self._held = self._held[:size], self._held[size:]
        if len(self._sink.parts) > num_parts or (was_open and not self._sink.is_open):
            self._raw = []  # this text belongs to a call
        else:
            self._raw.append(read)
        if block.state is BlockState.MORE:
            return size > 0
        self._block = None
        if block.state is BlockState.BROKEN:  # also in a call that was announced: clients keep the part that was sent
            self._awaits_closing = self._sink.is_open
            self._sink.end()
            self._give_back()
        else:
            self._sink.end()
            self._awaits_closing = self._is_after_block = True
            self._may_begin_bare = self._bare is not None
        return True

    def _give_back(self) -> None:
        """Return the block's text that is not part of a call as content."""
        raw, self._raw = "".join(self._raw), []
        if raw.strip(_BETWEEN_CALLS + (self._opening if len(self._opening) == 1 else "")):  # a special token is no text
            self._say(self._padding.hold_back(raw))

    def _say(self, text: str) -> None:
        if text:
            self._sink.parts.append(message_parts.ContentDelta(text))

    def _take(self) -> list[message_parts.MessagePart]:
        parts, self._sink.parts = self._sink.parts, []
        return parts


# --------------------------------------------------------------------------------------------------------------- custom
# Free text of custom tools, out of the call in which the model writes it: ``{"input": "..."}``.
#
# It is passed on while it is written. Arguments in another form are held until they are complete: if their only value
# is a string, it is the text; otherwise the arguments themselves are.


_OPENING = f'{{"{INPUT}":"'
_CUSTOM_SPACE = re.compile(r"[ \t\r\n]+")
# The start of a JSON string that can be decoded: whole escapes, and no half of a surrogate pair.
_RUN = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[dD][c-fC-F]..))*+', re.DOTALL
)
_HALF = re.compile(r"\\u(?:[dD][c-fC-F]..|[dD][89abAB]..(?=[^\\]|\\[^u]|\\u[^dD]|\\u.[^c-fC-F]))", re.DOTALL)


class CustomInputs:
    """A `ToolReader` around another that turns calls of the tools in `names` into custom ones."""

    def __init__(self, reader: message_parts.ToolReader, names: Container[str]) -> None:
        self._reader = reader
        self._names = names
        self._input: InputText | None = None  # of the open call, if it is custom
        self._index = 0

    def feed_text(self, text: str) -> list[message_parts.MessagePart]:
        return self._translated(self._reader.feed_text(text))

    def finish_text(self) -> list[message_parts.MessagePart]:
        return [*self._translated(self._reader.finish_text()), *self._end()]

    @property
    def cut_calls(self) -> Set[int]:
        return self._reader.cut_calls

    def _translated(self, parts: Iterable[message_parts.MessagePart]) -> list[message_parts.MessagePart]:
        found: list[message_parts.MessagePart] = []
        for part in parts:
            if isinstance(part, message_parts.ToolCallArguments) and self._input is not None:
                found += self._given(self._input.feed(part.fragment))
                continue
            found += self._end()
            if isinstance(part, message_parts.ToolCallStart) and part.name in self._names:
                self._input, self._index = InputText(), part.index
                found.append(message_parts.ToolCallStart(part.index, part.call_id, part.name, is_custom=True))
            else:
                found.append(part)
        return found

    def _end(self) -> list[message_parts.MessagePart]:
        text, self._input = self._input.finish() if self._input is not None else "", None
        return self._given(text)

    def _given(self, text: str) -> list[message_parts.MessagePart]:
        return [message_parts.ToolCallInput(self._index, text)] if text else []


class InputText:
    """Reads the text in the JSON arguments of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False  # in the string
        self._is_done = False
        self._is_other = False  # in another form

    def feed(self, fragment: str) -> str:
        if self._is_done:
            return ""
        self._held += fragment
        if self._is_other:
            return ""
        if not self._is_open and not self._opens():
            return ""
        text = ""
        while not self._is_done:
            run = _RUN.match(self._held)
            assert run is not None
            text += json.loads(f'"{run[0]}"', strict=False)
            self._held = self._held[run.end() :]
            self._is_done = self._held.startswith('"')
            half = _HALF.match(self._held)
            if half is None:
                break
            text += "\N{REPLACEMENT CHARACTER}"
            self._held = self._held[half.end() :]
        return text

    def finish(self) -> str:
        if self._is_open:
            return ""
        try:
            value = orjson.loads(self._held)
        except orjson.JSONDecodeError:  # broken off
            return self._held
        if isinstance(value, dict):
            found = value.get(INPUT) if INPUT in value or len(value) != 1 else next(iter(value.values()))
            if isinstance(found, str):
                return found
        return self._held

    def _opens(self) -> bool:
        start = _CUSTOM_SPACE.sub("", self._held)
        if not start.startswith(_OPENING):
            self._is_other = not _OPENING.startswith(start)
            return False
        self._is_open = True
        self._held = self._held[self._held.index(":") + 1 :].lstrip()[1:]
        return True
