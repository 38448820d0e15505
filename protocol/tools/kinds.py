"""The kinds of tools, and the functions that a request offers.

A tool that a vendor has defined is shown to the model as a function. A call comes back to the client as an item of the
tool's own type, and such items of earlier turns become calls of the function. Wrong arguments of the model become the
nearest call that the item can express.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import orjson
from pydantic_core import from_json

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_MILLISECONDS: Final = {**_NUMBER, "description": "Time limit in milliseconds."}
_OPERATIONS: Final = ("create_file", "update_file", "delete_file")


@dataclass(frozen=True, kw_only=True)
class ToolKind:
    """A kind of tool.

    `description`, `properties`, `required` and `commands` (the values of a property `command`) describe a
    vendor-defined tool to the model; `name` is the function's name if the client gives none. In Responses, a call is an
    item of the type `item`, with an id that begins with `id_prefix`. Its `field` holds the arguments: as text, streamed
    in `event`s, or as the object that `read` makes of them.
    """

    name: str = ""
    description: str = ""
    properties: Mapping[str, Any] | None = None
    required: Sequence[str] = ()
    commands: Sequence[str] = ()
    item: str = ""
    id_prefix: str = ""
    field: str = ""
    event: str | None = None
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def for_chat(self, name: str | None = None, *, strict: bool | None = True) -> dict[str, Any]:
        """Return a tool that a vendor has defined in chat's form."""
        commands = {"command": {"enum": list(self.commands)}} if self.commands else {}
        parameters = {
            "type": "object",
            "properties": {**commands, **(self.properties or {})},
            "required": [*commands, *self.required],
            "additionalProperties": False,
        }
        function = {"name": name or self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


def _exec(arguments: dict[str, Any]) -> dict[str, Any]:
    command, env = arguments.get("command"), arguments.get("env")
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


_EDIT: Final = {
    "path": {"type": "string", "description": "Absolute path of the file or directory."},
    "file_text": {"type": "string", "description": "For create: what the file holds."},
    "old_str": {"type": "string", "description": "For str_replace: text that stands in the file once."},
    "new_str": {"type": "string", "description": "For str_replace: what comes in its place."},
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes; 0 is the top."},
    "insert_text": {"type": "string", "description": "For insert: the text."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view: first and last line, from 1; -1 is the end.",
    },
}
_EDITOR = ToolKind(
    name="str_replace_based_edit_tool",
    description="Views, creates and edits files.",
    commands=["view", "create", "str_replace", "insert"],
    properties=_EDIT,
    required=["path"],
)

KINDS: Final[Mapping[str, ToolKind]] = {
    "function": ToolKind(
        item="function_call", id_prefix="fc", field="arguments", event="response.function_call_arguments"
    ),
    "custom": ToolKind(
        item="custom_tool_call", id_prefix="ctc", field="input", event="response.custom_tool_call_input"
    ),
    "local_shell": ToolKind(
        name="local_shell",
        description="Runs a command on the user's machine and returns its output.",
        properties={
            "command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."},
            "working_directory": {"type": "string", "description": "Where to run it."},
            "timeout_ms": _MILLISECONDS,
            "env": {"type": "object", "additionalProperties": _TEXT, "description": "Environment variables to set."},
            "user": {"type": "string", "description": "The user to run it as."},
        },
        required=["command"],
        item="local_shell_call",
        id_prefix="lsh",
        field="action",
        read=_exec,
    ),
    "shell": ToolKind(
        name="shell",
        description="Runs shell commands on the user's machine and returns their output.",
        properties={
            "commands": {"type": "array", "items": _TEXT, "description": "Commands for the shell, in order."},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {**_NUMBER, "description": "Characters of output to return."},
        },
        required=["commands"],
        item="shell_call",
        id_prefix="sh",
        field="action",
        read=_commands,
    ),
    "apply_patch": ToolKind(
        name="apply_patch",
        description="Creates, updates or deletes one file of the user's workspace.",
        properties={
            "type": {"enum": list(_OPERATIONS)},
            "path": {"type": "string", "description": "The file, relative to the workspace."},
            "diff": {
                "type": "string",
                "description": "The change in the V4A diff format, without a header: sections begin with @@, lines with"
                " a blank, + or -. To create a file, every line begins with +. Empty to delete one.",
            },
        },
        required=["type", "path", "diff"],
        item="apply_patch_call",
        id_prefix="apc",
        field="operation",
        read=_operation,
    ),
    "bash": ToolKind(
        name="bash",
        description="Runs commands in a shell that keeps its state between calls.",
        properties={
            "command": {"type": "string", "description": "The command to run."},
            "restart": {"type": "boolean", "description": "true starts the shell anew, without a command."},
        },
    ),
    "text_editor": _EDITOR,
    "text_editor_before_20250429": replace(
        _EDITOR, name="str_replace_editor", commands=[*_EDITOR.commands, "undo_edit"]
    ),
    "memory": ToolKind(
        name="memory",
        description="Keeps files below /memories between conversations: look there first, and note there what is worth"
        " knowing.",
        commands=["view", "create", "str_replace", "insert", "delete", "rename"],
        properties={**_EDIT, "old_path": _TEXT, "new_path": _TEXT},
    ),
}
"""The kinds by the tool's `type`, without the date of its version."""


MAX_TOOLS = 1024
MAX_TOOL_BYTES = 2 * 2**20
"""The most bytes of JSON of all tools of a request: they are copied several times before the context is checked."""

INPUT = "input"
"""The argument that holds the free text of a custom tool."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def partial_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Incomplete JSON gives its beginning, as SDKs read the same stream."""
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
    """A function that the model may call. `parameters` is a JSON Schema; None means a function without parameters."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """Return the function in the form of chat templates."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True, kw_only=True)
class CustomTool(Function):
    """A tool that takes free text, with the grammar `definition`. The model sees a function of one argument."""

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
            text = f"{self.description or ''}\n\nThe {INPUT} has to follow this {name}:\n{self.definition}".lstrip()
            entry["function"]["description"] = text
        return entry


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions that a request offers. With `choice` "required" the model must call one: `named`, if it is set.

    Without `parallel` it may call one only.
    """

    functions: tuple[Function, ...]
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def callable_functions(self) -> tuple[Function, ...]:
        return tuple(function for function in self.functions if self.named in (None, function.name))
