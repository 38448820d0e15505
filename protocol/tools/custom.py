"""Free text of custom tools, unwrapped from the call in which the model writes it: ``{"input": "..."}``.

The text is passed on while it is written. Where the model has put it into another form, it waits for the end: the only
string that there is, is meant; whatever else, the arguments are passed on as they are, so that nothing is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Set

import orjson

from protocol.message_parts import MessagePart, ToolCallArguments, ToolCallInput, ToolCallStart, ToolReader
from protocol.tools.functions import INPUT

_OPENING = f'{{"{INPUT}":"'
_SPACE = re.compile(r"[ \t\r\n]+")
# As much of a JSON string as can be decoded: whole escapes, and no half of a character beyond the 16 bits of one.
_RUN = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[dD][c-fC-F]..))*+', re.DOTALL
)
_HALF = re.compile(r"\\u(?:[dD][c-fC-F]..|[dD][89abAB]..(?=[^\\]|\\[^u]|\\u[^dD]|\\u.[^c-fC-F]))", re.DOTALL)


class CustomInputs:
    """A `ToolReader` around another: calls of the tools in `names` are custom, with their text for arguments."""

    def __init__(self, reader: ToolReader, names: Container[str]) -> None:
        self._reader = reader
        self._names = names
        self._input: InputText | None = None  # of the call that is being read, if it is custom
        self._index = 0

    def feed_text(self, text: str) -> list[MessagePart]:
        return self._translated(self._reader.feed_text(text))

    def finish_text(self) -> list[MessagePart]:
        return [*self._translated(self._reader.finish_text()), *self._end()]

    @property
    def cut_calls(self) -> Set[int]:
        return self._reader.cut_calls

    def _translated(self, parts: Iterable[MessagePart]) -> list[MessagePart]:
        found: list[MessagePart] = []
        for part in parts:
            if isinstance(part, ToolCallArguments) and self._input is not None:
                found += self._given(self._input.feed(part.fragment))
                continue
            found += self._end()
            if isinstance(part, ToolCallStart) and part.name in self._names:
                self._input, self._index = InputText(), part.index
                found.append(ToolCallStart(part.index, part.call_id, part.name, is_custom=True))
            else:
                found.append(part)
        return found

    def _end(self) -> list[MessagePart]:
        text, self._input = self._input.finish() if self._input is not None else "", None
        return self._given(text)

    def _given(self, text: str) -> list[MessagePart]:
        return [ToolCallInput(self._index, text)] if text else []


class InputText:
    """Takes the arguments of one call, which are JSON, gives the text in them."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False  # in the string
        self._is_done = False
        self._is_other = False  # in another form

    def feed(self, fragment: str) -> str:
        """What `fragment` adds to the text."""
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
        """The arguments have ended: what waited for that."""
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
        start = _SPACE.sub("", self._held)
        if not start.startswith(_OPENING):
            self._is_other = not _OPENING.startswith(start)
            return False
        self._is_open = True
        self._held = self._held[self._held.index(":") + 1 :].lstrip()[1:]
        return True
