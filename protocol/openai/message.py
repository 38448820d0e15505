"""The parts of a message in chat completions' spelling: one delta of a stream, and the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.message_parts import ContentDelta, MessagePart, ReasoningDelta, ToolCallArguments, ToolCallStart, join


def delta(part: MessagePart) -> dict[str, Any]:
    """`part` as the delta of a chunk: a call's id and name once, its arguments in pieces."""
    match part:
        case ReasoningDelta(text):
            return {"reasoning": text, "reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}


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
            case ToolCallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolCallArguments(index, fragment):
                calls[index]["function"]["arguments"] += fragment
    thought = "".join(reasoning) if reasoning else None
    fields = {
        "content": "".join(content) if content or not (calls or reasoning) else None,
        "reasoning": thought,
        "reasoning_content": thought,
    }
    return {**fields, "tool_calls": calls} if calls else fields
