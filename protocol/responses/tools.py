"""Tools of a request: functions, custom tools, those that the client runs in a form of the API, and groups of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from protocol.body import ClientModel, at_most, at_most_bytes, check_type, fail_fast, known_types, type_of, type_tag
from protocol.responses.built_in import BUILT_IN
from protocol.responses.calls import CallForm, flat_name
from protocol.tools.functions import MAX_TOOL_BYTES, MAX_TOOLS
from protocol.tools.left_out import Unserved, none_of, one_of


class FunctionTool(ClientModel):
    """A function that the client runs. `defer_loading` and others are accepted without effect."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, name: str) -> dict[str, Any]:
        """The tool in chat's form."""
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": {**fields, "name": name}}


class TextFormat(ClientModel):
    """Any text."""

    type: Literal["text"]


class GrammarFormat(ClientModel):
    """Text that follows a grammar."""

    type: Literal["grammar"]
    syntax: str
    definition: str


class CustomTool(ClientModel):
    """A tool that takes free text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[
        Annotated[TextFormat, Tag("$text")] | Annotated[GrammarFormat, Tag("$grammar")],
        Discriminator(type_tag),
        known_types("text", "grammar"),
    ] = TextFormat(type="text")

    def for_chat(self, name: str) -> dict[str, Any]:
        """The tool in chat's form."""
        custom: dict[str, Any] = {"name": name}
        if self.description is not None:
            custom["description"] = self.description
        if isinstance(self.format, GrammarFormat):
            custom["format"] = {"type": "grammar", "grammar": self.format.model_dump(exclude={"type"})}
        return {"type": "custom", "custom": custom}


class BuiltInTool(ClientModel):
    """One of `BUILT_IN`."""

    type: Literal["local_shell", "shell", "apply_patch"]

    @property
    def name(self) -> str:
        return self.type

    def for_chat(self, name: str) -> dict[str, Any]:
        """The tool in chat's form."""
        return BUILT_IN[self.type].for_chat(name)


class Namespace(ClientModel):
    """A group of tools."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("$function")]
                | Annotated[CustomTool, Tag("$custom")]
                | Annotated[Unserved, Tag("$unserved"), none_of("function", "custom")],
                one_of("function", "custom"),
            ]
        ],
        fail_fast,
        at_most(MAX_TOOLS, "tools"),
    ]


_SERVED = ("function", "custom", "namespace", *BUILT_IN)


def _tag(value: Any) -> str | None:
    kind = type_of(value)
    if not isinstance(kind, str):
        return None
    if kind == "shell" and isinstance(value, dict) and isinstance(place := value.get("environment"), dict):
        kind = "shell" if place.get("type") == "local" else ""  # containers are OpenAI's
    return "$built_in" if kind in BUILT_IN else f"${kind}" if kind in _SERVED else "$unserved"


AnyTool = FunctionTool | CustomTool | BuiltInTool | Namespace | Unserved
Tools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("$function")]
            | Annotated[CustomTool, Tag("$custom")]
            | Annotated[BuiltInTool, Tag("$built_in")]
            | Annotated[Namespace, Tag("$namespace")]
            | Annotated[Unserved, Tag("$unserved"), none_of(*_SERVED)],
            Discriminator(
                _tag, custom_error_type="rule", custom_error_message="must be an object with a type, such as function"
            ),
        ]
    ],
    fail_fast,
    at_most_bytes(MAX_TOOL_BYTES),
    at_most(MAX_TOOLS, "tools"),
]


class NamedTool(ClientModel):
    """The tool that has to be called, or one of those that may be. A namespace stands for all in it."""

    type: Literal["function", "custom", "namespace", "local_shell", "shell", "apply_patch"]
    name: str = ""
    namespace: str | None = None

    def names(self, forms: dict[str, CallForm]) -> list[str]:
        """What the model calls the tools that are meant."""
        if self.type == "namespace":
            return [flat for flat, form in forms.items() if form.namespace == self.name]
        name = flat_name(self.namespace, self.name or self.type)
        if name not in forms:  # a tool of a namespace may be named without it
            name = next((flat for flat, form in forms.items() if form.name == name), name)
        return [name]


_NAMED = ("function", "custom", *BUILT_IN)


class AllowedTools(ClientModel):
    """Some of the tools; of the others the model is not told."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedTool, Tag("$named")]
                | Annotated[Unserved, Tag("$unserved"), none_of(*_NAMED, "namespace")],
                Discriminator(lambda value: "$named" if type_of(value) in (*_NAMED, "namespace") else "$unserved"),
            ]
        ],
        fail_fast,
        at_most(MAX_TOOLS, "tools"),
    ] = Field(min_length=1)


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "$word"
    return "$allowed_tools" if type_tag(value) == "$allowed_tools" else "$named"


def _known_choice(value: Any) -> Any:
    if not isinstance(value, str):
        check_type(value, (*_NAMED, "allowed_tools"))
    return value


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$word")]
    | Annotated[NamedTool, Tag("$named")]
    | Annotated[AllowedTools, Tag("$allowed_tools")],
    Discriminator(_choice_tag),
    BeforeValidator(_known_choice),
]


def call_forms(tools: Iterable[AnyTool]) -> dict[str, CallForm]:
    """How calls are told, by the names that the model knows."""
    return {flat: CallForm(kind.type, kind.name, namespace) for flat, kind, namespace in _offered(tools)}


def chat_tools(tools: Iterable[AnyTool]) -> list[dict[str, Any]]:
    """The tools in chat's form, those of namespaces among them; what is left out is left out there."""
    offered = [tool.for_chat(flat) for flat, tool, _ in _offered(tools)]
    return offered + [tool.for_chat() for tool in unserved(tools)]


def chat_choice(choice: str | NamedTool | AllowedTools, tools: Sequence[AnyTool]) -> str | dict[str, Any]:
    """The choice in chat's form."""
    if isinstance(choice, str):
        return choice
    forms = call_forms(tools)
    if isinstance(choice, NamedTool):
        return _named(choice.names(forms)[0])
    allowed: list[dict[str, Any]] = []
    for tool in choice.tools:
        allowed += [tool.for_chat()] if isinstance(tool, Unserved) else map(_named, tool.names(forms))
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}


def unserved(tools: Iterable[AnyTool]) -> list[Unserved]:
    """The tools that are left out, of namespaces too."""
    found: list[Unserved] = []
    for tool in tools:
        inside = tool.tools if isinstance(tool, Namespace) else (tool,)
        found += [each for each in inside if isinstance(each, Unserved)]
    return found


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _offered(
    tools: Iterable[AnyTool],
) -> Iterator[tuple[str, FunctionTool | CustomTool | BuiltInTool, str | None]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for inside in tool.tools:
                if not isinstance(inside, Unserved):
                    yield flat_name(tool.name, inside.name), inside, tool.name
        elif not isinstance(tool, Unserved):
            yield tool.name, tool, None
