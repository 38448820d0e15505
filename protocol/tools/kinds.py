"""Functions and built-in tools of a request.

The prompt describes each built-in tool as a function; its call comes back as an item of the tool's own, and both are
such items in earlier turns. What a model left free has written wrongly becomes the nearest call that the item can say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import orjson
from pydantic_core import from_json

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_MILLISECONDS: Final = {**_NUMBER, "description": "Time limit in milliseconds."}
_OPERATIONS: Final = ("create_file", "update_file", "delete_file")


class BuiltIn(NamedTuple):
    """What the model is told, and the field of the item that holds what it says: made of the call's arguments."""

    id_prefix: str
    description: str
    properties: Mapping[str, Any]
    required: list[str]
    field: str
    read: Callable[[dict[str, Any]], dict[str, Any]]

    def for_chat(self, name: str) -> dict[str, Any]:
        """The tool in chat's form."""
        parameters = {
            "type": "object",
            "properties": dict(self.properties),
            "required": self.required,
            "additionalProperties": False,
        }
        function = {"name": name, "description": self.description, "parameters": parameters, "strict": True}
        return {"type": "function", "function": function}

    def item_field(self, arguments: str) -> dict[str, Any]:
        """The item's field, of arguments that may be broken off."""
        return {self.field: self.read(partial_object(arguments))}


def _exec(arguments: dict[str, Any]) -> dict[str, Any]:
    command = arguments.get("command")
    env = arguments.get("env")
    return {
        "type": "exec",
        "command": ["bash", "-lc", command] if isinstance(command, str) else _strings(command),
        "env": {name: str(value) for name, value in env.items()} if isinstance(env, dict) else {},
        "timeout_ms": _number(arguments.get("timeout_ms")),
        "working_directory": _string(arguments.get("working_directory")),
        "user": _string(arguments.get("user")),
    }


def _commands(arguments: dict[str, Any]) -> dict[str, Any]:
    commands = arguments.get("commands")
    return {
        "commands": [commands] if isinstance(commands, str) else _strings(commands),
        "timeout_ms": _number(arguments.get("timeout_ms")),
        "max_output_length": _number(arguments.get("max_output_length")),
    }


def _operation(arguments: dict[str, Any]) -> dict[str, Any]:
    kind = arguments.get("type")
    kind = kind if kind in _OPERATIONS else "update_file"
    operation = {"type": kind, "path": _string(arguments.get("path")) or ""}
    return operation if kind == "delete_file" else {**operation, "diff": _string(arguments.get("diff")) or ""}


def _strings(value: Any) -> list[str]:
    return [each if isinstance(each, str) else str(each) for each in value] if isinstance(value, list) else []


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "local_shell": BuiltIn(
        "lsh",
        "Runs a command on the user's machine and returns its output.",
        {
            "command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."},
            "working_directory": {"type": "string", "description": "Where to run it."},
            "timeout_ms": _MILLISECONDS,
            "env": {"type": "object", "additionalProperties": _TEXT, "description": "Environment variables to set."},
            "user": {"type": "string", "description": "The user to run it as."},
        },
        ["command"],
        "action",
        _exec,
    ),
    "shell": BuiltIn(
        "sh",
        "Runs shell commands on the user's machine and returns their output.",
        {
            "commands": {"type": "array", "items": _TEXT, "description": "Commands for the shell, in order."},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {**_NUMBER, "description": "Characters of output to return."},
        },
        ["commands"],
        "action",
        _commands,
    ),
    "apply_patch": BuiltIn(
        "apc",
        "Creates, updates or deletes one file of the user's workspace.",
        {
            "type": {"enum": list(_OPERATIONS)},
            "path": {"type": "string", "description": "The file, relative to the workspace."},
            "diff": {
                "type": "string",
                "description": "The change in the V4A diff format, without a header: sections begin with @@, lines with"
                " a blank, + or -. To create a file, every line begins with +. Empty to delete one.",
            },
        },
        ["type", "path", "diff"],
        "operation",
        _operation,
    ),
}
"""By the type of the tool, which is the name that the model calls, and with ``_call`` the type of its item."""


# ------------------------------------------------------------------------------------------------------------ functions
# What a request says about tools, in no wire format's words.


MAX_TOOLS = 1024
MAX_TOOL_BYTES = 2 * 2**20
"""Of JSON, all tools of a request together: they pass several hands before they are found too long for the context."""

INPUT = "input"
"""The argument that holds the free text of a custom tool."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def partial_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Of what breaks off, as much as there is: what SDKs make of the same stream."""
    try:
        try:
            value = from_json(arguments, allow_partial=True)
        except ValueError:  # complete JSON with half a surrogate pair, which text cannot hold
            halves = json.dumps(json.loads(arguments), ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            value = json.loads(halves.decode("utf-16-le", "replace"))
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError:  # an integer of more than 64 bits; as a float it can be written
            value = orjson.loads(json.dumps(value))
            orjson.dumps(value)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that the model may call. `parameters` is a JSON Schema; None stands for a function without any."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """What arguments have to fit."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True, kw_only=True)
class CustomTool(Function):
    """A tool that takes free text: for the model, a function of this one argument. `definition` is a grammar for it."""

    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""

    @property
    def schema(self) -> Mapping[str, Any]:
        text = {"type": "string"}
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}

    def for_template(self) -> dict[str, Any]:
        entry = super().for_template()
        if self.syntax is not None:
            name = {"lark": "Lark grammar", "regex": "regular expression"}[self.syntax]
            told = f"{self.description or ''}\n\nThe {INPUT} has to follow this {name}:\n{self.definition}".lstrip()
            entry["function"]["description"] = told
        return entry


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Which functions a request offers, and whether the model must call one.

    `named` is the one that it must call, with `choice` "required". Without `parallel` it may call one only.
    """

    functions: tuple[Function, ...]
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def callable_functions(self) -> tuple[Function, ...]:
        """The functions that the answer may call."""
        return tuple(function for function in self.functions if self.named in (None, function.name))
