"""Tools that the client runs and whose form the API has fixed: shells, and patches.

The model is told of each as a function; its call comes back as an item of the tool's own, and both are such
items in earlier turns. What a model left free has written wrongly becomes the nearest call that the item can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from protocol.tools.functions import partial_object

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
