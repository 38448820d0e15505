"""Grammars for answers: response formats, tool choices, structural tags.

Each function makes a `StructuredOutput`. `AsyncLLM.stream` compiles it, and raises `InvalidRequest` with param
"structured_output" if it cannot be enforced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.messages import StructuredOutput, StructuredOutputKind
from protocol.body import json_text

JsonSchema = Mapping[str, Any] | bool


class Tag(NamedTuple):
    """JSON between two pieces of text, such as ``<tool_call>`` and ``</tool_call>``.

    The text of a special token in `begin` or `end` means that token. With `regex` the JSON is a string that matches it;
    its quotation marks belong to `begin` and `end`. With `schema` None, which is only for outputs that consist of tags,
    the content is free text without special tokens.
    """

    begin: str
    schema: JsonSchema | None
    end: str
    lenient: bool = False  # keywords that no grammar enforces are left out
    regex: str | None = None


def json_schema(schema: JsonSchema, *, lenient: bool = False) -> StructuredOutput:
    """Return the grammar of one JSON value that fits `schema`; if `lenient`, unsupported keywords are left out."""
    return StructuredOutput(kind=StructuredOutputKind.JSON_SCHEMA, value=_canonical(schema), lenient=lenient)


def choice(texts: Sequence[str]) -> StructuredOutput:
    """Return the grammar of one of these texts."""
    return StructuredOutput(kind=StructuredOutputKind.CHOICE, value=_canonical(list(texts)))


def tagged_json(
    tags: Sequence[Tag],
    *,
    triggers: Sequence[str] = (),
    text: bool = True,
    required: bool = False,
    repeat: bool = True,
    separator: str = "",
) -> StructuredOutput:
    """Return the grammar of JSON between tags: ``free text <tool_call>{"name": ...}</tool_call> free text``.

    With `text`, anything may come until one of the `triggers` (default: the `begin` of every tag); then one of the tags
    that begin with it must follow. Without `text` the output consists of tags, with `separator` between them.
    `required` asks for at least one tag, `repeat` allows more than one. With `text` and `required` and without
    `repeat`, the output ends with its tag.

    A tool choice "required" is `text=False, required=True`; a named one is the same with one tag and `repeat=False`;
    "auto" with strict functions is `text=True`.
    """
    value = {
        "tags": [{name: value for name, value in tag._asdict().items() if value is not None} for tag in tags],
        "triggers": list(triggers or dict.fromkeys(tag.begin for tag in tags)),
        "text": text,
        "required": required,
        "repeat": repeat,
        "separator": separator,
    }
    lenient = any(tag.lenient for tag in tags)
    return StructuredOutput(kind=StructuredOutputKind.STRUCTURAL_TAG, value=_canonical(value), lenient=lenient)


def _canonical(value: Any) -> str:
    # The keys keep the client's order, in which the model writes them.
    return json_text(value, "structured_output")
