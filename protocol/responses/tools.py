"""Tools of a request, their calls and outputs."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from protocol.body import ClientModel, OneOf, at_most, at_most_bytes, fail_fast, json_text, type_of
from protocol.openai.chat import MAX_PARTS, RefusalPart
from protocol.openai.structured import TextFormat
from protocol.openai.tools import GrammarDefinition
from protocol.tools.kinds import KINDS, MAX_TOOL_BYTES, MAX_TOOLS, ToolKind, partial_object
from protocol.tools.unsupported import UnsupportedEntry, UnsupportedPart


class FunctionTool(ClientModel):
    """A function that the client runs. `defer_loading` and others are accepted without effect."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, name: str) -> dict[str, Any]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": {**fields, "name": name}}


class FlatGrammar(GrammarDefinition):
    type: Literal["grammar"]


class FreeTextTool(ClientModel):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[TextFormat | FlatGrammar, OneOf()] = TextFormat(type="text")

    def for_chat(self, name: str) -> dict[str, Any]:
        custom = {**self.model_dump(include={"description"}, exclude_none=True), "name": name}
        if isinstance(self.format, FlatGrammar):
            custom["format"] = {"type": "grammar", "grammar": self.format.model_dump(exclude={"type"})}
        return {"type": "custom", "custom": custom}


class BuiltInTool(ClientModel):
    """A tool that OpenAI has defined and the client runs."""

    type: Literal["local_shell", "shell", "apply_patch"]

    @property
    def name(self) -> str:
        return self.type

    def for_chat(self, name: str) -> dict[str, Any]:
        return KINDS[self.type].for_chat(name)


class Namespace(ClientModel):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | FreeTextTool | UnsupportedEntry, OneOf()]], fail_fast, at_most(MAX_TOOLS, "tools")
    ]


def _kind(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") == "shell" and isinstance(place := tool.get("environment"), dict):
        return "shell" if place.get("type") == "local" else UnsupportedEntry  # OpenAI runs the containers
    return type_of(tool)


AnyTool = FunctionTool | FreeTextTool | BuiltInTool | Namespace | UnsupportedEntry
Tools = Annotated[
    list[Annotated[AnyTool, OneOf(kind_of=_kind)]],
    fail_fast,
    at_most_bytes(MAX_TOOL_BYTES),
    at_most(MAX_TOOLS, "tools"),
]


class NamedTool(ClientModel):
    """One of the tools that may be called. A namespace stands for all of its tools."""

    type: Literal["function", "custom", "namespace", "local_shell", "shell", "apply_patch"]
    name: str = ""
    namespace: str | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if not self.name and self.type in ("function", "custom", "namespace"):
            raise PydanticCustomError("rule", "is required: the tool to call", {"field": "name"})
        return self

    def names(self, forms: dict[str, CallForm]) -> list[str]:
        """Return the names by which the model knows the tools."""
        if self.type == "namespace":
            return [flat for flat, form in forms.items() if form.namespace == self.name]
        name = flat_name(self.namespace, self.name or self.type)
        if name not in forms:  # a tool of a namespace may be named without it
            name = next((flat for flat, form in forms.items() if form.name == name), name)
        return [name]


class ChosenTool(NamedTool):
    """The tool that has to be called."""

    type: Literal["function", "custom", "local_shell", "shell", "apply_patch"]


class AllowedNames(ClientModel):
    """A subset of the tools; the model is not shown the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedTool | UnsupportedEntry, OneOf()]], fail_fast, at_most(MAX_TOOLS, "tools")] = (
        Field(min_length=1)
    )


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedNames,
    OneOf("none, auto, required or an object with a type"),
]


def call_forms(tools: Iterable[AnyTool]) -> dict[str, CallForm]:
    """Return the forms of calls by the names that the model knows."""
    return {flat: CallForm(KINDS[tool.type], tool.name, namespace) for flat, tool, namespace in _offered(tools)}


def chat_tools(tools: Iterable[AnyTool]) -> list[dict[str, Any]]:
    """Return all tools in chat's form. Unsupported tools are included; chat does not show them to the model."""
    offered = [tool.for_chat(flat) for flat, tool, _ in _offered(tools)]
    return offered + [tool.for_chat() for tool in unsupported_tools(tools)]


def chat_choice(choice: str | ChosenTool | AllowedNames, tools: Sequence[AnyTool]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    forms = call_forms(tools)
    if isinstance(choice, ChosenTool):
        return _named(choice.names(forms)[0])
    allowed: list[dict[str, Any]] = []
    for tool in choice.tools:
        allowed += [tool.for_chat()] if isinstance(tool, UnsupportedEntry) else map(_named, tool.names(forms))
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}


def unsupported_tools(tools: Iterable[AnyTool]) -> list[UnsupportedEntry]:
    """Return the unsupported tools, those in namespaces too."""
    found: list[UnsupportedEntry] = []
    for tool in tools:
        inside = tool.tools if isinstance(tool, Namespace) else (tool,)
        found += [each for each in inside if isinstance(each, UnsupportedEntry)]
    return found


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _offered(tools: Iterable[AnyTool]) -> Iterator[tuple[str, FunctionTool | FreeTextTool | BuiltInTool, str | None]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for inside in tool.tools:
                if not isinstance(inside, UnsupportedEntry):
                    yield flat_name(tool.name, inside.name), inside, tool.name
        elif not isinstance(tool, UnsupportedEntry):
            yield tool.name, tool, None


class ItemText(ClientModel):
    """Text of any role. Annotations are accepted without effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_string_or_list = OneOf("a string or an array of text parts")
_Part = Annotated[ItemText | RefusalPart, OneOf()]
Content = Annotated[str | Annotated[list[_Part], fail_fast, at_most(MAX_PARTS, "parts")], _string_or_list]
_OutputPart = Annotated[ItemText | RefusalPart | UnsupportedPart, OneOf()]
Output = Annotated[str | Annotated[list[_OutputPart], fail_fast, at_most(MAX_PARTS, "parts")], _string_or_list]
"""A tool's result. The model sees a note for each part that is not text."""


def texts(content: str | Sequence[ItemText | RefusalPart | UnsupportedPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def chat_content(content: str | Sequence[ItemText | RefusalPart | UnsupportedPart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in texts(content)]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool in a namespace; models know no namespaces."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class CallForm(NamedTuple):
    """The form of one tool's calls: the tool's kind, and the client's name for it."""

    kind: ToolKind
    name: str
    namespace: str | None = None

    def item(self, item_id: str, call_id: str, text: str, status: str) -> dict[str, Any]:
        """Return the call as an item. `text` is its arguments or its input, possibly incomplete."""
        kind = self.kind
        item = {"id": item_id, "type": kind.item, "call_id": call_id}
        if kind.read is None:
            namespace = {"namespace": self.namespace} if self.namespace else {}
            return {**item, "name": self.name, kind.field: text, "status": status, **namespace}
        place = {"environment": {"type": "local"}} if kind.name == "shell" else {}
        return {**item, "status": status, kind.field: kind.read(partial_object(text)), **place}

    def done_events(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (event name, fields) of the events that precede `output_item.done`."""
        if self.kind.event is not None:
            name = {"name": self.name} if self.kind is KINDS["function"] else {}
            field = self.kind.field
            yield f"{self.kind.event}.done", {"item_id": item["id"], **name, field: item[field]}
        elif self.kind.name == "shell" and item["status"] == "completed":  # half a command would look complete
            for index, command in enumerate(item["action"]["commands"]):
                yield "response.shell_call_command.added", {"command_index": index, "command": ""}
                yield "response.shell_call_command.delta", {"command_index": index, "delta": command}
                yield "response.shell_call_command.done", {"command_index": index, "command": command}


_KINDS_BY_ITEM = {kind.item: kind for kind in KINDS.values() if kind.item}


def _needed(kind: ToolKind) -> tuple[str, ...]:
    return (kind.field,) if kind.read else (kind.field, "name")


def _add_what_types_require(schema: dict[str, Any]) -> None:
    """Describe which fields a call needs, by its type."""
    known = {name: field["anyOf"][0] for name, field in schema["properties"].items() if "anyOf" in field}
    schema["anyOf"] = [
        {"properties": {"type": {"const": item}} | {name: known[name] for name in needed}, "required": needed}
        for item, needed in ((item, list(_needed(kind))) for item, kind in _KINDS_BY_ITEM.items())
    ]


class CallItem(ClientModel):
    """A call that the model has made. Its content is in `arguments`, `input`, `action` or `operation`, by its type."""

    model_config = ConfigDict(json_schema_extra=_add_what_types_require)

    type: Literal["function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    id: str = ""
    call_id: str
    name: str | None = None
    namespace: str | None = None
    status: str = "completed"
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _says_what_is_called(self) -> Self:
        for field in _needed(self._kind):
            if getattr(self, field) is None:
                raise PydanticCustomError("rule", "is required", {"field": field})
        self.id = self.id or new_id(self._kind.id_prefix)
        return self

    def listed(self) -> dict[str, Any]:
        said = self._said if self._kind.read is None else json_text(self._said, "input")
        return CallForm(self._kind, self.name or "", self.namespace).item(self.id, self.call_id, said, self.status)

    def for_chat(self) -> dict[str, Any]:
        """Return the call in chat's form, as the model has made it."""
        name, said, kind = flat_name(self.namespace, self.name or ""), self._said, self._kind
        if kind is KINDS["custom"]:
            return {"id": self.call_id, "type": "custom", "custom": {"name": name, "input": said}}
        if kind.read is not None:
            known = kind.properties or {}
            given = {key: value for key, value in kind.read(said).items() if key in known and value not in (None, {})}
            name, said = kind.name, json_text(given, "input")
        return {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": said}}

    @property
    def _kind(self) -> ToolKind:
        return _KINDS_BY_ITEM[self.type]

    @property
    def _said(self) -> Any:
        return getattr(self, self._kind.field)


class CallOutputItem(ClientModel):
    """The result of a tool's call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str = Field(default_factory=lambda: new_id("fco"))
    call_id: str
    output: Output

    def listed(self) -> dict[str, Any]:
        output = "\n".join(texts(self.output))
        return {"id": self.id, "type": self.type, "call_id": self.call_id, "output": output, "status": "completed"}

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": chat_content(self.output)}


class ShellOutput(ClientModel):
    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        code = self.outcome.get("exit_code")
        end = "timed out" if self.outcome.get("type") == "timeout" else f"exit code {code}" if code is not None else ""
        return "\n".join(part for part in (self.stdout, self.stderr, end) if part)


class BuiltInOutputItem(ClientModel):
    """The result of a tool that OpenAI has defined. A local shell's result may have the call's id as its own id."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    id: str | None = None
    call_id: str | None = None
    status: str = "completed"
    output: (
        Annotated[
            str | Annotated[list[ShellOutput], fail_fast, at_most(MAX_PARTS, "outputs")],
            OneOf("a string or an array of outputs"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _answers_a_call(self) -> Self:
        if self.call_id is None and self.id is None:
            raise PydanticCustomError("rule", "is required", {"field": "call_id"})
        return self

    def listed(self) -> dict[str, Any]:
        item = self.model_dump(exclude_none=True)
        return {**item, "id": self.id or new_id("out"), "call_id": self.call_id or self.id}

    def for_chat(self) -> dict[str, Any]:
        given = self.output or ""
        text = given if isinstance(given, str) else "\n".join(each.text for each in given)
        return {"role": "tool", "tool_call_id": self.call_id or self.id, "content": text or self.status}
