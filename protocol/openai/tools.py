"""OpenAI's tools: definitions and choice of a request, and the calls of earlier turns.

Tools are functions and custom tools; the model is not shown tools that OpenAI runs itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import InvalidRequest
from protocol.body import ClientModel, OneOf, at_most, at_most_bytes, fail_fast, json_text
from protocol.openai.structured import TextFormat
from protocol.tools.kinds import INPUT, MAX_TOOL_BYTES, MAX_TOOLS, CustomTool, Function, ToolUse
from protocol.tools.unsupported import UnsupportedEntry, types_of

MAX_TOOL_CALLS = 128  # calls of one message
MAX_PARAMETERS = 64 * 1024  # bytes of JSON of one function

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class FunctionDefinition(ClientModel):
    """A function that may be called. `parameters` is a JSON Schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], at_most_bytes(MAX_PARAMETERS)] | None = None
    strict: bool = False


class ToolDefinition(ClientModel):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name

    def function_offered(self) -> Function:
        return Function(**self.function.model_dump())


class GrammarDefinition(ClientModel):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_PARAMETERS)


class GrammarFormat(ClientModel):
    type: Literal["grammar"]
    grammar: GrammarDefinition


class CustomDefinition(ClientModel):
    name: FunctionName
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, OneOf()] = TextFormat(type="text")


class CustomToolDefinition(ClientModel):
    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        return self.custom.name

    def function_offered(self) -> CustomTool:
        tool = CustomTool(name=self.custom.name, description=self.custom.description)
        if isinstance(form := self.custom.format, GrammarFormat):
            return replace(tool, strict=True, **form.grammar.model_dump())
        return tool


class ToolName(ClientModel):
    name: str


class NamedFunction(ClientModel):
    type: Literal["function"]
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(ClientModel):
    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


AnyTool = ToolDefinition | CustomToolDefinition | UnsupportedEntry
Tools = Annotated[
    list[Annotated[AnyTool, OneOf()]], fail_fast, at_most_bytes(MAX_TOOL_BYTES), at_most(MAX_TOOLS, "tools")
]


class AllowedTools(ClientModel):
    """A subset of the tools; the model is not shown the others."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunction | NamedCustomTool | UnsupportedEntry, OneOf()]],
        fail_fast,
        at_most(MAX_TOOLS, "tools"),
    ] = Field(min_length=1)


class AllowedToolsChoice(ClientModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_Word = Literal["none", "auto", "required"]
Choice = _Word | NamedFunction | NamedCustomTool | AllowedToolsChoice
ToolChoice = Annotated[
    Annotated[_Word, WithJsonSchema({"enum": ["none", "auto", "required", "any"]})]
    | NamedFunction
    | NamedCustomTool
    | AllowedToolsChoice,
    OneOf('none, auto, required or {"type": "function", "function": {"name": "..."}}'),
    BeforeValidator(lambda value: "required" if value == "any" else value),  # as Mistral's clients say
]


def _arguments_text(arguments: Any) -> Any:
    return json_text(arguments, "messages") if isinstance(arguments, dict) else arguments


class CalledFunction(ClientModel):
    """A function called in an earlier turn. `arguments` is JSON text; some clients send the object."""

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any])] = "{}"

    def for_template(self) -> dict[str, Any]:
        """Return the call for templates: arguments are an object, or text if they are not JSON."""
        try:
            arguments = orjson.loads(self.arguments or "{}")
            orjson.dumps(arguments)  # a template cannot write deeply nested arguments either
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class CalledTool(ClientModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {
            **({} if self.id is None else {"id": self.id}),
            "type": "function",
            "function": self.function.for_template(),
        }


class CustomCall(ClientModel):
    name: str
    input: str = ""


class CalledCustomTool(ClientModel):
    id: str | None = None
    type: Literal["custom"]
    custom: CustomCall

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form of chat templates: as a call of a function, which the model wrote."""
        function = {"name": self.custom.name, "arguments": {INPUT: self.custom.input}}
        return {**({} if self.id is None else {"id": self.id}), "type": "function", "function": function}


CalledTools = Annotated[
    list[Annotated[CalledTool | CalledCustomTool, OneOf(default="function")]],
    fail_fast,
    at_most(MAX_TOOL_CALLS, "calls"),
]


Functions = Annotated[
    list[FunctionDefinition], fail_fast, at_most_bytes(MAX_TOOL_BYTES), at_most(MAX_TOOLS, "functions")
]
FunctionCall = Annotated[Literal["none", "auto"] | ToolName, OneOf('none, auto or {"name": "..."}')]


def tools_of(
    functions: Sequence[FunctionDefinition], call: Literal["none", "auto"] | ToolName | None
) -> tuple[Sequence[AnyTool], Choice | None]:
    """Return `functions` and `function_call` of older clients as tools and tool choice."""
    tools = [ToolDefinition(type="function", function=function) for function in functions]
    return tools, NamedFunction(type="function", function=call) if isinstance(call, ToolName) else call


def check_tool_choice(
    tools: Sequence[AnyTool], choice: Choice | None, fields: tuple[str, str] = ("tools", "tool_choice")
) -> None:
    """Raise `InvalidRequest` if two tools have one name, or if a call of a tool that is not offered is demanded.

    `fields` are the client's names of `tools` and `tool_choice`.
    """
    tools_field, choice_field = fields
    names: set[str] = set()
    for tool in _served(tools):
        if tool.name in names:
            raise InvalidRequest(
                f"{tools_field} must have different names, but {tool.name!r} comes twice; rename one.",
                param=tools_field,
            )
        names.add(tool.name)
    asked: Sequence[NamedFunction | NamedCustomTool | UnsupportedEntry] = ()
    is_demanded = choice == "required"
    if isinstance(choice, AllowedToolsChoice):
        asked = choice.allowed_tools.tools
        is_demanded = choice.allowed_tools.mode == "required"
        if is_demanded and all(isinstance(each, UnsupportedEntry) for each in asked):
            names, tools = set(), [each for each in asked if isinstance(each, UnsupportedEntry)]
    elif isinstance(choice, NamedFunction | NamedCustomTool):
        asked, is_demanded = (choice,), True
    if is_demanded and not names:
        unsupported = ", ".join(kind[:64] for kind in types_of(tools[:8]))
        why = f" that this server supports, but got {unsupported}" if unsupported else "; send some or leave it out"
        raise InvalidRequest(f"{choice_field} needs {tools_field}{why}.", param=choice_field)
    for each in asked:
        if not isinstance(each, UnsupportedEntry) and each.name not in names:
            raise InvalidRequest(
                f"{choice_field} names {each.name[:128]!r}, which is none of {tools_field}, or is left out of them"
                " because this server does not support it; name another.",
                param=choice_field,
            )


def check_demanded_grammars(use: ToolUse, fields: tuple[str, str]) -> None:
    """Raise `InvalidRequest` for a demanded call of a custom tool with a Lark grammar."""
    for function in use.callable_functions:
        if isinstance(function, CustomTool) and function.syntax == "lark":
            raise InvalidRequest(
                f"{fields[0]} has the tool {function.name!r} with a Lark grammar, which is not enforced within the JSON"
                f" of a call, but {fields[1]} demands one; use a grammar with the syntax regex, or {fields[1]} auto.",
                param=fields[0],
            )


def tool_use(tools: Sequence[AnyTool], choice: Choice | None, *, parallel: bool) -> ToolUse | None:
    """Return the checked tools and choice in the form of all dialects; None if no tool may be called."""
    served = _served(tools)
    named: str | None = None
    word: _Word = "auto"
    match choice:
        case str():
            word = choice
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {each.name for each in allowed.tools if not isinstance(each, UnsupportedEntry)}
            served, word = [tool for tool in served if tool.name in names], allowed.mode
        case NamedFunction() | NamedCustomTool():
            named, word = choice.name, "required"
    if not served or word == "none":
        return None
    functions = tuple(tool.function_offered() for tool in served)
    return ToolUse(functions=functions, choice=word, named=named, parallel=parallel)


def _served(tools: Sequence[Any]) -> list[ToolDefinition | CustomToolDefinition]:
    return [tool for tool in tools if not isinstance(tool, UnsupportedEntry)]
