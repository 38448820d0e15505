"""Calls with arguments in a notation of their own, which become JSON as they come: Gemma 4's and Python's."""

from __future__ import annotations

import json
import re

from protocol.syntax.call_reader import CallSink
from protocol.syntax.json_calls import NamedCall
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.parameter_calls import json_value
from protocol.syntax.reasoning import unfinished_tag
from protocol.syntax.record import Reading

GEMMA_QUOTE = '<|"|>'
GEMMA_END = "<tool_call|>"
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class GemmaCall(NamedCall):
    """A `Block` of one call: ``call:weather{city:<|"|>Ulm<|"|>,days:3}``. Strings may also be those of JSON."""

    def __init__(self, reading: Reading, sink: CallSink) -> None:
        super().__init__(r"\s*call:\s*NAME\s*", reading.tags.stand_in(GEMMA_END), sink)
        self._quote = reading.tags.stand_in(GEMMA_QUOTE)
        self._word = re.compile(rf'[^{{}}\[\],:"{self._quote[0]}]+')
        self._is_in_string = False

    def _arguments(self, text: str, scanner: JsonScanner) -> int:
        translated, size = self._translated(text)
        if size:
            if scanner.scan(translated) == len(translated) and not scanner.is_broken:
                self._sink.arguments(translated)
            else:
                size = 0
            self._check(scanner)
        return size

    def _translated(self, text: str) -> tuple[str, int]:
        """Return the next piece of the arguments as JSON, and its length in the text: 0 if more text is needed."""
        quote = self._quote
        if self._is_in_string:
            end = text.find(quote)
            size = end if end >= 0 else len(text) - unfinished_tag(text, [quote])
            piece = json.dumps(text[:size], ensure_ascii=False)[1:-1]
            self._is_in_string = end < 0
            return (piece, size) if end < 0 else (f'{piece}"', size + len(quote))
        if text.startswith(quote):
            self._is_in_string = True
            return '"', len(quote)
        if quote.startswith(text):
            return "", 0
        if text[0] == '"':
            string = _JSON_STRING.match(text)
            return (string[0], string.end()) if string else ("", 0)
        if (word := self._word.match(text)) is None:
            return text[0], 1
        if not word[0].strip():
            return word[0], word.end()
        if word.end() == len(text):
            return "", 0
        is_key = text[word.end()] == ":"
        value = word[0].strip()
        return json.dumps(value, ensure_ascii=False) if is_key else json_value(value), word.end()
