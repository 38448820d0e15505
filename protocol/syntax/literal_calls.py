"""Calls with arguments in Gemma 4's or Python's notation, translated into JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Container

from protocol.syntax.call_reader import Block, BlockState, CallSink
from protocol.syntax.json_calls import CallObject, NamedCall
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.parameter_calls import json_value, python_tree
from protocol.syntax.reasoning import unfinished_tag
from protocol.syntax.record import Reading

GEMMA_QUOTE = '<|"|>'
GEMMA_END = "<tool_call|>"
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class GemmaCall(NamedCall):
    """A `Block` of one call: ``call:weather{city:<|"|>Ulm<|"|>,days:3}``. Strings may also be JSON strings."""

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


# --------------------------------------------------------------------------------------------------------------- python


_NAME = "[A-Za-z0-9_.-]"
_FIRST = re.compile(rf"\s*\[\s*(?:({_NAME}{{1,128}})\s*\(|(?=\{{))")
_BEFORE_FIRST = re.compile(rf"\s*(?:\[\s*{_NAME}{{0,128}}\s*)?")
_NEXT = re.compile(rf"[\s,]*(?:({_NAME}{{1,128}})\s*\(|(?=\{{)|(\]))")
_BEFORE_NEXT = re.compile(rf"[\s,]*{_NAME}{{0,128}}\s*")
_CODE = re.compile(r"""("[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')|[()\[\]{}]|[^"'()\[\]{}]+""", re.DOTALL)
_JSON_WORD = re.compile(r"\b(?:true|false|null)\b")
_WORDS = {"true": "True", "false": "False", "null": "None"}


class PythonCalls:
    """A `Block` of calls in Python, ``[weather(city="Ulm", days=3), time()]``, or of objects in JSON.

    `names` are the functions that may be called; None allows any. Arguments are passed on when a call is complete.
    """

    def __init__(self, sink: CallSink, names: Container[str] | None = None) -> None:
        self.state = BlockState.MORE
        self._sink = sink
        self._names = names
        self._object: Block | None = None
        self._is_begun = False
        self._depth = 0  # brackets that are open in a call
        self._place = 0  # characters of the arguments that have been scanned
        self._code = ""

    def step(self, text: str) -> int:
        if self._depth:
            return self._arguments(text)
        if self._object is not None:
            size = self._object.step(text)
            if self._object.state is BlockState.BROKEN:
                self.state = BlockState.BROKEN
            elif self._object.state is BlockState.DONE:
                self._object = None
            return size
        found = (_NEXT if self._is_begun else _FIRST).match(text)
        if found is None or (found[1] and self._names is not None and found[1] not in self._names):
            if found or not (_BEFORE_NEXT if self._is_begun else _BEFORE_FIRST).fullmatch(text):
                self.state = BlockState.BROKEN
            return 0
        self._is_begun = True
        if found[1]:
            self._sink.start(found[1])
            self._depth, self._place, self._code = 1, 0, "call("
        elif text[found.end() : found.end() + 1] == "{":
            self._object = CallObject(self._sink, self._names)
            return found.end() or self.step(text)  # 0 would wait for more text
        else:
            self.state = BlockState.DONE
        return found.end()

    def _arguments(self, text: str) -> int:
        while self._depth:
            token = _CODE.match(text, self._place)
            if token is None or (token.end() == len(text) and text[-1] not in "\"'()[]{}"):  # perhaps half a word
                return 0
            if token[1]:
                self._code += token[1].replace("\n", "\\n")
            else:
                self._code += _JSON_WORD.sub(lambda word: _WORDS[word[0]], token[0])
                self._depth += (token[0] in ("(", "[", "{")) - (token[0] in (")", "]", "}"))
            self._place = token.end()
        arguments = _json_of_code(self._code)
        if arguments is None:
            self.state = BlockState.BROKEN
            return 0
        self._sink.arguments(arguments)
        self._sink.end_arguments()
        self._sink.end()
        return self._place


def _json_of_code(code: str) -> str | None:
    """Return the named arguments of a call in Python as JSON; None if `code` is something else."""
    try:
        call = python_tree(code)
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
        if "" in values or len(values) < len(call.keywords):  # a name twice would lose a value
            return None
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
