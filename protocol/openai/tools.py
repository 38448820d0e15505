"""Tools in OpenAI's words: the request's definitions and choice, and the calls of earlier turns.

Functions are the only tools: others, which OpenAI runs itself or which take free text, are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, Tag, field_validator

from engine.errors import InvalidRequest
from protocol.body import ClientModel, at_most, check_size, fail_fast, json_type
from protocol.tools.functions import Function, ToolUse

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # of one message
MAX_PARAMETERS = 64 * 1024  # bytes of JSON, of one function

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class FunctionDefinition(ClientModel):
    """A function that may be called. `parameters` is a JSON Schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _parameters_are_small(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        check_size(parameters, MAX_PARAMETERS)
        return parameters


class ToolDefinition(ClientModel):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionChoice(ClientModel):
    """The function that must be called."""

    name: str


class NamedToolChoice(ClientModel):
    """`tool_choice` as an object: this function must be called."""

    type: Literal["function"]
    function: FunctionChoice


Tools = Annotated[list[ToolDefinition], fail_fast, at_most(MAX_TOOLS, "functions"), Field(min_length=1)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$string")] | Annotated[NamedToolChoice, Tag("$object")],
    json_type('none, auto, required or {"type": "function", "function": {"name": "..."}}'),
]


class CalledFunction(ClientModel):
    """What an earlier turn has called. `arguments` is JSON text."""

    name: str
    arguments: str = "{}"

    def for_template(self) -> dict[str, Any]:
        """As templates read it: arguments are an object. What the model wrote wrongly stays the text that it is."""
        try:
            arguments = orjson.loads(self.arguments or "{}")
            orjson.dumps(arguments)  # what is nested too deeply for that, a template cannot write either
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class CalledTool(ClientModel):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        return {
            **({} if self.id is None else {"id": self.id}),
            "type": "function",
            "function": self.function.for_template(),
        }


CalledTools = Annotated[list[CalledTool], fail_fast, at_most(MAX_TOOL_CALLS, "calls")]


def check_tool_choice(tools: Sequence[ToolDefinition] | None, choice: str | NamedToolChoice | None) -> None:
    """Raise `InvalidRequest` for functions of one name, a choice without tools, or one that is not offered."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools must have different names, but {twice!r} comes twice.", param="tools")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise InvalidRequest("tool_choice is only allowed with tools; send some or leave it out.", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice names a function that is not in tools: {choice.function.name[:128]!r}.", param="tool_choice"
        )


def tool_use(
    tools: Sequence[ToolDefinition] | None, choice: str | NamedToolChoice | None, *, parallel: bool
) -> ToolUse | None:
    """The checked fields in no wire format's words; None if no tool may be called."""
    if not tools or choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    return ToolUse(
        functions=tuple(Function(**tool.function.model_dump()) for tool in tools),
        choice="required" if named is not None or choice == "required" else "auto",
        named=named,
        parallel=parallel,
    )
