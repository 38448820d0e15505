"""Tools of a request: the client's own, and those that it runs in a form which Anthropic has fixed.

A model of Anthropic's knows the latter by heart; ours are told of functions of the same names, with the same inputs. So
their calls come back as `tool_use` like all others.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Discriminator, Tag

from protocol.body import ClientModel, at_most, at_most_bytes, fail_fast, type_of
from protocol.tools.functions import MAX_TOOL_BYTES, MAX_TOOLS
from protocol.tools.left_out import Unserved, none_of


class Tool(ClientModel):
    """A tool that the client runs. `cache_control`, `defer_loading`, `eager_input_streaming`, `input_examples` and
    `allowed_callers` are accepted without effect."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool in chat's form."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


_TEXT: Final = {"type": "string"}
_PATH: Final = {"type": "string", "description": "Absolute path of the file or directory."}
_RANGE: Final = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: first and last line, from 1; -1 is the end.",
}
_EDIT: Final = {
    "path": _PATH,
    "file_text": {"type": "string", "description": "For create: what the file holds."},
    "old_str": {"type": "string", "description": "For str_replace: text that stands in the file once."},
    "new_str": {"type": "string", "description": "For str_replace: what comes in its place."},
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes; 0 is the top."},
    "insert_text": {"type": "string", "description": "For insert: the text."},
    "view_range": _RANGE,
}
_BASH: Final[dict[str, Any]] = {
    "command": {"type": "string", "description": "The command to run."},
    "restart": {"type": "boolean", "description": "true starts the shell anew, without a command."},
}


class _Family(NamedTuple):
    """What the model is told of one family of these tools. `name` is where the client gives none."""

    name: str
    description: str
    commands: list[str]
    properties: dict[str, Any]  # beside the command
    required: list[str]


_FIXED: Final = {
    "bash": _Family("bash", "Runs commands in a shell that keeps its state between calls.", [], _BASH, []),
    "text_editor": _Family(
        "str_replace_based_edit_tool",
        "Views, creates and edits files.",
        ["view", "create", "str_replace", "insert"],
        _EDIT,
        ["path"],
    ),
    "memory": _Family(
        "memory",
        "Keeps files below /memories between conversations: look there first, and note there what is worth knowing.",
        ["view", "create", "str_replace", "insert", "delete", "rename"],
        {**_EDIT, "old_path": _TEXT, "new_path": _TEXT},
        [],
    ),
}
_TYPE = re.compile(rf"({'|'.join(_FIXED)})_\d{{8}}")


class FixedTool(ClientModel):
    """A shell, an editor or a memory, of whatever version."""

    type: str
    name: str | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool in chat's form."""
        found = _TYPE.fullmatch(self.type)
        assert found is not None
        name, description, commands, properties, required = _FIXED[found[1]]
        if commands:
            if found[1] == "text_editor" and self.type < "text_editor_20250429":
                name, commands = "str_replace_editor", [*commands, "undo_edit"]
            properties, required = {"command": {"enum": commands}, **properties}, ["command", *required]
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        function = {"name": self.name or name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function | ({} if self.strict is None else {"strict": self.strict})}


def _tag(value: Any) -> str | None:
    kind = type_of(value)
    if kind is None or kind == "custom":
        return "$custom"
    if not isinstance(kind, str):
        return None
    return "$fixed" if _TYPE.fullmatch(kind) else "$unserved"


Tools = Annotated[
    list[
        Annotated[
            Annotated[Tool, Tag("$custom")]
            | Annotated[FixedTool, Tag("$fixed")]
            | Annotated[Unserved, Tag("$unserved"), none_of("custom")],
            Discriminator(
                _tag, custom_error_type="rule", custom_error_message="must be an object with a type, such as custom"
            ),
        ]
    ],
    fail_fast,
    at_most_bytes(MAX_TOOL_BYTES),
    at_most(MAX_TOOLS, "tools"),
]
