"""What one recorded request is, and the words that many of them share.

The field names, types and combinations are those that the clients put on the wire; prompts and descriptions are made up
and short, so that the whole corpus costs seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.harness import MODEL

Answer = Literal["text", "function_call", "custom_tool_call", "json", "vectors", "count", "models", "error"]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A request as a client sends it, and what has to come back."""

    client: str
    shape: str
    path: str
    body: dict[str, Any] | None = None  # None: a GET
    headers: dict[str, str] = field(default_factory=dict)
    answer: Answer = "text"
    left_out: str = ""  # tools and items that the header warns of, before what it says about all of them
    grammars: str = ""  # tools with a Lark grammar, which the header warns of
    without_effect: str = ""  # fields that the header warns of
    status: int = 200
    complaint: str = ""  # words of the error's message

    def __str__(self) -> str:
        return f"{self.client}: {self.shape}"

    @property
    def warning(self) -> str | None:
        """The value of the header `x-headrace-warning`; None if there is none."""
        fields = self.without_effect and f"fields without effect: {self.without_effect}"
        grammars = self.grammars and f"grammars without effect: {self.grammars}"
        parts = (
            (self.left_out, "this server does not support them"),
            (grammars, "Lark in a tool's call is not enforced"),
            (fields, "this server does not use them"),
        )
        return "; ".join(f"{part} ({reason})" for part, reason in parts if part) or None


def chat(client: str, shape: str, *, model: str = MODEL, **fields: Any) -> Recorded:
    """A chat completion. Keywords that a `Recorded` has describe it, all others are the body's."""
    return _recorded(client, shape, "/v1/chat/completions", {"model": model}, fields)


def completion(client: str, shape: str, **fields: Any) -> Recorded:
    return _recorded(client, shape, "/v1/completions", {"model": MODEL}, fields)


def responses(client: str, shape: str, **fields: Any) -> Recorded:
    return _recorded(client, shape, "/v1/responses", {"model": MODEL}, fields)


def messages(client: str, shape: str, *, path: str = "/v1/messages?beta=true", **fields: Any) -> Recorded:
    return _recorded(client, shape, path, {"model": MODEL}, fields)


_ABOUT = ("answer", "complaint", "grammars", "headers", "left_out", "status", "without_effect")


def _recorded(client: str, shape: str, path: str, body: dict[str, Any], fields: dict[str, Any]) -> Recorded:
    about = {name: fields.pop(name) for name in _ABOUT if name in fields}
    return Recorded(client=client, shape=shape, path=path, body=body | fields, **about)


# --- what many send

ASK = "Which files are here?"
LISTING = "README.md\nsetup.py\n"
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
PATH = {"type": "string", "description": "Where, relative to the workspace."}
PLACE = {"type": "string", "enum": [".", "src"]}


def parameters(required: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def function(name: str, description: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A function as chat has it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema, **more}}


def flat(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same as the Responses API has it."""
    return {"type": "function", **tool["function"], **more}


def anthropic(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same as Anthropic's Messages have it."""
    inner = tool["function"]
    return {"name": inner["name"], "description": inner["description"], "input_schema": inner["parameters"], **more}


READ = function(
    "read",
    "Give the lines of a file.",
    parameters(
        ["path"],
        path=PATH,
        offset={"type": "integer", "minimum": 0, "description": "First line."},
        limit={"type": "integer", "exclusiveMinimum": 0, "description": "Most lines."},
    ),
)
BASH = function(
    "bash",
    "Run a command in a shell and give what it prints.",
    parameters(
        ["command"],
        command={"type": "string", "description": "The command."},
        timeout={"type": "number", "description": "Milliseconds until it is ended."},
    ),
)
EDIT = function(
    "edit",
    "Replace a text in a file by another.",
    parameters(
        ["path", "old", "new"],
        path=PATH,
        old={"type": "string"},
        new={"type": "string"},
        all={"type": "boolean", "default": False},
    ),
)
LIST = function("list", "List a folder.", parameters(["path"], path=PLACE))
TODO_LIST = function(
    "todo",
    "Write the list of what is to be done.",
    parameters(
        ["todos"],
        todos={
            "type": "array",
            "items": parameters(
                ["content", "status"],
                content={"type": "string", "minLength": 1},
                status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
            ),
        },
    ),
)
TOOLS = [READ, BASH, EDIT, LIST, TODO_LIST]


def called(name: str = "bash", arguments: Any = '{"command":"ls"}', call_id: str = "call_1") -> dict[str, Any]:
    """A call in a message of the assistant."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
