"""Calls written parameter by parameter, each value as plain text between tags.

    <tool_call>
    <function=weather>
    <parameter=city>
    Ulm
    </parameter>
    </function>
    </tool_call>

A value becomes JSON by the types that the function's schema gives it (`json_value`). The value of a string is passed on
while it is written; others wait for their end. The block may also hold a call as a JSON object: grammars enforce this
form, and models of these families sometimes write it.
"""

from __future__ import annotations

import ast
import enum
import json
import re
import warnings
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass
from typing import Any

from protocol.syntax.call_reader import Block, BlockState, CallSink
from protocol.syntax.json_calls import MAX_NAME, CallObject, NamedCall
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.reasoning import find_tag, unfinished_tag
from protocol.syntax.record import Reading

_NAME = re.compile(r"[^\s<>\"'={}()\ud800-\udfff]+")
_STRING_FLAG = '" string="'  # of DeepSeek, behind the key: is the value a string?
_ANY: Set[str] = frozenset()
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_STRING_ONLY = {"string"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """The tags before and after the name of a function, a key and a value, and at the end of a call.

    Without `end` the block's closing tag ends the call. With `trims`, a line break after the tag before a value and one
    before the tag after it belong to the tags.
    """

    name: tuple[str, str] = ("", "")
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    trims: bool = False


class _Part(enum.Enum):
    NAME = enum.auto()
    KEY = enum.auto()
    VALUE_TAG = enum.auto()
    VALUE = enum.auto()


class ParameterCalls:
    """A `Block` of one call or several."""

    def __init__(self, form: Form, closing: str, reading: Reading, sink: CallSink) -> None:
        spell = reading.tags.stand_in
        self.state = BlockState.MORE
        self._sink = sink
        self._functions = reading.functions
        self._name_tags, self._key_tags, self._value_tags = (
            (spell(before), spell(after)) for before, after in (form.name, form.key, form.value)
        )
        self._call_end, self._end = spell(form.end), spell(form.end or closing)
        self._value_ends = [self._value_tags[1], *(["\n" + self._value_tags[1]] if form.trims else [])]
        self._trims = form.trims
        self._part = _Part.NAME
        self._object: Block | None = None
        self._properties: Mapping[str, Any] = {}
        self._types = _ANY
        self._num_calls = 0
        self._num_values = 0
        self._is_first = False  # nothing of the value has been read

    def step(self, text: str) -> int:
        if self._object is not None:
            size = self._object.step(text)
            self.state = self._object.state
            return size
        if self._part is _Part.VALUE:
            return self._value(text)
        start = len(text) - len(text.lstrip())
        rest = text[start:]
        if not rest:
            return start
        match self._part:
            case _Part.NAME:
                return start + self._name(rest)
            case _Part.KEY:
                return start + self._key(rest)
        return start + self._value_tag(rest)

    def _name(self, text: str) -> int:
        before, after = self._name_tags
        if self._num_calls and not (before and (text.startswith(before) or before.startswith(text))):
            self.state = BlockState.DONE
        elif not self._num_calls and text[0] == "{":
            self._object = CallObject(self._sink)
        elif self._comes(text, before):
            stops = [after] if after else [self._key_tags[0], self._end]
            found = find_tag(text[len(before) :], stops)
            if found is None:
                return self._wait(text, before, max(stops, key=len))
            name = text[len(before) : len(before) + found[0]].strip()
            if found[0] > MAX_NAME or not _NAME.fullmatch(name):
                self.state = BlockState.BROKEN
            else:
                self._sink.start(name)
                self._num_calls += 1
                self._num_values = 0
                function = self._functions.get(name)
                properties = function.schema.get("properties") if function else None
                self._properties = properties if isinstance(properties, Mapping) else {}
                self._part = _Part.KEY
                return len(before) + found[0] + len(after)
        return 0

    def _key(self, text: str) -> int:
        before, after = self._key_tags
        if text.startswith(self._end):
            self._sink.arguments("}" if self._num_values else "{}")
            self._sink.end_arguments()
            self._sink.end()
            self._part = _Part.NAME
            self.state = BlockState.MORE if self._call_end else BlockState.DONE
            return len(self._call_end)
        if self._end.startswith(text) or not self._comes(text, before):
            return 0
        end = text.find(after, len(before))
        if end < 0:
            return self._wait(text, before, after)
        key, flag, is_string = text[len(before) : end].strip().partition(_STRING_FLAG)
        if end - len(before) > MAX_NAME or is_string not in ("true", "false", ""):
            self.state = BlockState.BROKEN
            return 0
        self._types = types_of(self._properties.get(key, {}))
        if flag:
            self._types = _STRING_ONLY if is_string == "true" else self._types - _STRING_ONLY
        self._sink.arguments(f"{', ' if self._num_values else '{'}{_quoted(key)}: ")
        self._num_values += 1
        self._part = _Part.VALUE_TAG if self._value_tags[0] else _Part.VALUE
        self._is_first = True
        return end + len(after)

    def _value_tag(self, text: str) -> int:
        if not self._comes(text, self._value_tags[0]):
            return 0
        self._part = _Part.VALUE
        return len(self._value_tags[0])

    def _value(self, text: str) -> int:
        if self._is_first and self._types == _STRING_ONLY:
            self._sink.arguments('"')
        start = 1 if self._is_first and self._trims and text[0] == "\n" else 0
        self._is_first = False
        if start:
            return start
        found = find_tag(text, self._value_ends)
        if self._types == _STRING_ONLY:
            end = found[0] if found else len(text) - unfinished_tag(text, self._value_ends)
            self._sink.arguments(_quoted(text[:end])[1:-1] + ('"' if found else ""))
        elif found:
            end = found[0]
            self._sink.arguments(json_value(text[:end], self._types))
        else:
            end = 0
        if found is None:
            return end
        self._part = _Part.KEY
        return end + len(found[1])

    def _wait(self, text: str, before: str, after: str) -> int:
        """Wait for `after`; break if the name before it would be longer than `MAX_NAME`."""
        if len(text) >= len(before) + MAX_NAME + len(after):
            self.state = BlockState.BROKEN
        return 0

    def _comes(self, text: str, tag: str) -> bool:
        """Return True if the text begins with the tag. If it can no longer become the tag, the block breaks."""
        if not tag.startswith(text[: len(tag)]):
            self.state = BlockState.BROKEN
        return text.startswith(tag)


# --------------------------------------------------------------------------------------------------------------- values


def types_of(schema: Any) -> Set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(members := schema.get(key), list) and members:
            found = [types_of(member) for member in members]
            return frozenset().union(*found) if all(found) else _ANY
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return {_KINDS.get(type(value), "null") for value in values}
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    return frozenset(name for name in names if isinstance(name, str))


def json_value(text: str, types: Set[str] = _ANY) -> str:
    """Return the JSON of a value that a model wrote as text, by the types of its schema.

    JSON that may be of such a type is taken as it is, and so is its spelling in Python. Anything else is a string.
    """
    if types == _STRING_ONLY:
        return _quoted(text)
    stripped = text.strip()
    word = stripped.lower()
    if "boolean" in types and word in ("true", "false"):
        return word
    if "null" in types and word in ("null", "none"):
        return "null"
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        kind = _KINDS.get(type(value), "null")
        if kind == "number" and value.is_integer() and types & {"integer", "number"} == {"integer"}:
            return str(int(value))
        if not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types:
            return stripped
    if types & {"object", "array"}:
        try:
            value = ast.literal_eval(python_tree(stripped))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
    return _quoted(text)


def python_tree(code: str) -> ast.expr:
    """Return a parsed expression, without Python's warnings of unknown escapes in it. Raises as `ast.parse`."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(code, mode="eval").body


def _refuse(name: str) -> None:
    raise ValueError(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------- gemma
# Calls with arguments in Gemma 4's notation, translated into JSON.


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
# Calls in Python's notation, translated into JSON.


_PYTHON_NAME = "[A-Za-z0-9_.-]"
_FIRST = re.compile(rf"\s*\[\s*(?:({_PYTHON_NAME}{{1,128}})\s*\(|(?=\{{))")
_BEFORE_FIRST = re.compile(rf"\s*(?:\[\s*{_PYTHON_NAME}{{0,128}}\s*)?")
_NEXT = re.compile(rf"[\s,]*(?:({_PYTHON_NAME}{{1,128}})\s*\(|(?=\{{)|(\]))")
_BEFORE_NEXT = re.compile(rf"[\s,]*{_PYTHON_NAME}{{0,128}}\s*")
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
