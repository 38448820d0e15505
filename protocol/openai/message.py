"""The parts of a message in chat completions' spelling: one delta of a stream, and the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.message_parts import (
    ContentDelta,
    MessagePart,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallInput,
    ToolCallStart,
    join,
)


def delta(part: MessagePart) -> dict[str, Any]:
    """`part` as the delta of a chunk: a call's id and name once, its arguments in pieces."""
    match part:
        case ReasoningDelta(text):
            return {"reasoning": text, "reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index):
            return {"tool_calls": [{"index": index, **_begun(part)}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case ToolCallInput(index, fragment):
            return {"tool_calls": [{"index": index, "custom": {"input": fragment}}]}


def in_old_form(fields: dict[str, Any]) -> dict[str, Any]:
    """A delta or a message with its call, of which there is one at most, told as `function_call`."""
    others = {name: value for name, value in fields.items() if name != "tool_calls"}
    return {**others, "function_call": fields["tool_calls"][0]["function"]} if "tool_calls" in fields else fields


def _begun(start: ToolCallStart) -> dict[str, Any]:
    if start.is_custom:
        return {"id": start.call_id, "type": "custom", "custom": {"name": start.name, "input": ""}}
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}


def message_fields(parts: Iterable[MessagePart]) -> dict[str, Any]:
    """The fields of a whole message that `parts` fill. Content is null if there is none but calls or reasoning."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in join(parts):
        match part:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                calls.append(_begun(part))
            case ToolCallArguments(index, fragment):
                calls[index]["function"]["arguments"] += fragment
            case ToolCallInput(index, fragment):
                calls[index]["custom"]["input"] += fragment
    thought = "".join(reasoning) if reasoning else None
    fields = {
        "content": "".join(content) if content or not (calls or reasoning) else None,
        "reasoning": thought,
        "reasoning_content": thought,
    }
    return {**fields, "tool_calls": calls} if calls else fields
