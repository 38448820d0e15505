"""Tools in OpenAI's words: the request's definitions and choice, and the calls of earlier turns.

Functions are the only tools: others, which OpenAI runs itself, are left out of what the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, Tag, field_validator

from engine.errors import InvalidRequest
from protocol.body import ClientModel, at_most, at_most_bytes, check_size, fail_fast, json_type
from protocol.tools.functions import MAX_TOOL_BYTES, MAX_TOOLS, Function, ToolUse
from protocol.tools.left_out import Unserved, none_of, one_of, types_of

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
    """A function in `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name


class FunctionChoice(ClientModel):
    """The function that must be called."""

    name: str


class NamedToolChoice(ClientModel):
    """`tool_choice` as an object: this function must be called."""

    type: Literal["function"]
    function: FunctionChoice


AnyTool = ToolDefinition | Unserved
Tools = Annotated[
    list[
        Annotated[
            Annotated[ToolDefinition, Tag("$function")] | Annotated[Unserved, Tag("$unserved"), none_of("function")],
            one_of("function"),
        ]
    ],
    fail_fast,
    at_most_bytes(MAX_TOOL_BYTES),
    at_most(MAX_TOOLS, "tools"),
]
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


def check_tool_choice(tools: Sequence[AnyTool], choice: str | NamedToolChoice | None) -> None:
    """Raise `InvalidRequest` for tools of one name, and for the demanded call of one that is not offered."""
    names: set[str] = set()
    for tool in _served(tools):
        if tool.name in names:
            raise InvalidRequest(f"tools must have different names, but {tool.name!r} comes twice.", param="tools")
        names.add(tool.name)
    if choice in (None, "none", "auto"):
        return
    if not names:
        left_out = ", ".join(kind[:64] for kind in types_of(tools[:8]))
        why = f" that this server serves: left out is {left_out}" if left_out else "; send some or leave it out"
        raise InvalidRequest(f"tool_choice needs tools{why}.", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice names a function that is not in tools, or is left out of them because nobody serves it "
            f"here: {choice.function.name[:128]!r}.",
            param="tool_choice",
        )


def tool_use(tools: Sequence[AnyTool], choice: str | NamedToolChoice | None, *, parallel: bool) -> ToolUse | None:
    """The checked fields in no wire format's words; None if no tool may be called."""
    functions = tuple(Function(**tool.function.model_dump()) for tool in _served(tools))
    if not functions or choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    return ToolUse(
        functions=functions,
        choice="required" if named is not None or choice == "required" else "auto",
        named=named,
        parallel=parallel,
    )


def _served(tools: Sequence[AnyTool]) -> list[ToolDefinition]:
    return [tool for tool in tools if isinstance(tool, ToolDefinition)]
