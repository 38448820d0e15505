"""Tools for chat templates that know nothing of them, so that every model can be offered some.

The functions and the way to call them go into the system message; calls and results of earlier turns are written into
the messages as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.tools.formats import ToolFormat
from protocol.tools.functions import Function

Message = dict[str, Any]


def without_tools(messages: Sequence[Message], functions: Sequence[Function], tool_format: ToolFormat) -> list[Message]:
    """The same conversation for a template that knows neither tools, nor their calls, nor the role of their results."""
    plain = [_plain(message, tool_format) for message in messages]
    if not functions:
        return plain
    offer = _offer(functions, tool_format)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{content_text(plain[0]['content'])}\n\n{offer}"}, *plain[1:]]
    return [{"role": "system", "content": offer}, *plain]


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _offer(functions: Sequence[Function], tool_format: ToolFormat) -> str:
    tag = tool_format.tag("NAME", True)
    listed = "\n".join(json.dumps(function.for_template()["function"], ensure_ascii=False) for function in functions)
    return (
        "You can call functions to help the user. These are the functions, with the JSON Schemas of their "
        f"parameters:\n\n{listed}\n\n"
        "To call one, answer with its name and its arguments as a JSON object, exactly like this:\n\n"
        f"{tag.begin}{{ARGUMENTS}}{tag.end}\n\n"
        "The result comes with the next message. If no function is needed, just answer."
    )


def _plain(message: Message, tool_format: ToolFormat) -> Message:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{content_text(message['content'])}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        content = content_text(message["content"])
        written = [content] if content else []
        written += [_written(call["function"], tool_format) for call in calls]
        message = {**message, "content": "\n".join(written)}
        del message["tool_calls"]
    return message


def _written(function: Mapping[str, Any], tool_format: ToolFormat) -> str:
    tag = tool_format.tag(function["name"], True)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{tag.begin}{text}{tag.end}"
