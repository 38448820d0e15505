"""Hermes' syntax, which Qwen and many others share: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Container

from protocol.syntax.call_reader import BlockReader, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag
from protocol.syntax.json_calls import CallObject
from protocol.syntax.message_parts import ToolReader
from protocol.syntax.reasoning import SpecialTags

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
TAGS = (OPENING, CLOSING)
END_TOKENS = ("<|im_end|>",)


def new_reader(new_call_id: NewCallId, names: Container[str], tags: SpecialTags) -> ToolReader:
    """Reads one choice. A function that was not offered is still a call, since it is plainly meant as one."""
    return BlockReader(CallObject, new_call_id, opening=tags.stand_in(OPENING), closing=tags.stand_in(CLOSING))


def tag(name: str, schema: JsonSchema) -> Tag:
    """A call as a grammar writes it."""
    return Tag(f'{OPENING}\n{{"name": {json.dumps(name)}, "arguments": ', schema, f"}}\n{CLOSING}")
