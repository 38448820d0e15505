"""Llama 3's syntax: the whole answer is ``{"name": ..., "parameters": {...}}``, or such objects after `<|python_tag|>`.

Several calls are parted by semicolons. Since nothing but its look tells a bare object from an answer in JSON, it is a
call only if it names a function that was offered.
"""

from __future__ import annotations

import json
from collections.abc import Container
from functools import partial

from protocol.syntax.call_reader import BlockReader, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag
from protocol.syntax.json_calls import CallObject
from protocol.syntax.message_parts import ToolReader
from protocol.syntax.reasoning import SpecialTags

OPENING = "<|python_tag|>"
TAGS = (OPENING,)
END_TOKENS = ("<|eot_id|>", "<|eom_id|>")


def new_reader(new_call_id: NewCallId, names: Container[str], tags: SpecialTags) -> ToolReader:
    """Reads one choice."""
    new_block = partial(CallObject, names=names)
    return BlockReader(new_block, new_call_id, opening=tags.stand_in(OPENING), bare="{", separators=";")


def tag(name: str, schema: JsonSchema) -> Tag:
    """A call as a grammar writes it."""
    return Tag(f'{{"name": {json.dumps(name)}, "parameters": ', schema, "}")
