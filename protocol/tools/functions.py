"""What a request says about tools, in no wire format's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic_core import from_json

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
