"""Calls of tools and their outputs as items, each kind of tool with items and events of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from protocol.body import ClientModel, at_most, fail_fast, json_text, json_type
from protocol.openai.chat import MAX_PARTS
from protocol.responses.built_in import BUILT_IN
from protocol.responses.parts import Output, chat_content, texts


def new_id(kind: str) -> str:
    """An id for an item that came without."""
    return f"{kind}_{uuid.uuid4().hex}"


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace: it knows of no namespaces."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class CallForm(NamedTuple):
    """How the calls of one tool are told: what kind of tool it is, and what the client calls it."""

    kind: str  # function, custom or one of `BUILT_IN`
    name: str
    namespace: str | None = None

    @property
    def id_prefix(self) -> str:
        return {"function": "fc", "custom": "ctc"}.get(self.kind) or BUILT_IN[self.kind].id_prefix

    @property
    def delta_event(self) -> str | None:
        """The event with a piece of the call's text; None if the client is told of the whole only."""
        return {
            "function": "response.function_call_arguments.delta",
            "custom": "response.custom_tool_call_input.delta",
        }.get(self.kind)

    def item(self, item_id: str, call_id: str, text: str, status: str) -> dict[str, Any]:
        """The call as an item, of its arguments or its input."""
        if self.kind in BUILT_IN:
            item = {"id": item_id, "type": f"{self.kind}_call", "call_id": call_id, "status": status}
            place = {"environment": {"type": "local"}} if self.kind == "shell" else {}
            return {**item, **BUILT_IN[self.kind].item_field(text), **place}
        kind, field = ("custom_tool_call", "input") if self.kind == "custom" else ("function_call", "arguments")
        item = {"id": item_id, "type": kind, "call_id": call_id, "name": self.name, field: text, "status": status}
        return item | ({"namespace": self.namespace} if self.namespace else {})

    def done_events(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events before the item's own end: names and fields."""
        if self.kind == "function":
            fields = {"item_id": item["id"], "name": self.name, "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", fields
        elif self.kind == "custom":
            yield "response.custom_tool_call_input.done", {"item_id": item["id"], "input": item["input"]}
        elif self.kind == "shell" and item["status"] == "completed":  # half a command would look complete
            for index, command in enumerate(item["action"]["commands"]):
                yield "response.shell_call_command.added", {"command_index": index, "command": ""}
                yield "response.shell_call_command.delta", {"command_index": index, "delta": command}
                yield "response.shell_call_command.done", {"command_index": index, "command": command}


class _NamedCall(ClientModel):
    call_id: str
    name: str
    namespace: str | None = None
    status: str = "completed"

    def listed(self) -> dict[str, Any]:
        """The item as the API lists it."""
        return self.model_dump(exclude_none=True)


class FunctionCallItem(_NamedCall):
    """A call that the model has made. `arguments` is JSON as text."""

    type: Literal["function_call"]
    id: str = Field(default_factory=lambda: new_id("fc"))
    arguments: str

    def for_chat(self) -> dict[str, Any]:
        """The call in chat's form."""
        function = {"name": flat_name(self.namespace, self.name), "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CustomToolCallItem(_NamedCall):
    """A call of a custom tool that the model has made."""

    type: Literal["custom_tool_call"]
    id: str = Field(default_factory=lambda: new_id("ctc"))
    input: str

    def for_chat(self) -> dict[str, Any]:
        """The call in chat's form."""
        custom = {"name": flat_name(self.namespace, self.name), "input": self.input}
        return {"id": self.call_id, "type": "custom", "custom": custom}


class BuiltInCallItem(ClientModel):
    """A call of one of `BUILT_IN` that the model has made."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    id: str = Field(default_factory=lambda: new_id("call"))
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    status: str = "completed"

    @model_validator(mode="after")
    def _says_what_to_do(self) -> Self:
        if self._said is None:
            raise PydanticCustomError("rule", "is required", {"field": BUILT_IN[self._tool].field})
        return self

    def listed(self) -> dict[str, Any]:
        """The item as the API lists it."""
        item = {"id": self.id, "type": self.type, "call_id": self.call_id, "status": self.status}
        built_in = BUILT_IN[self._tool]
        return {**item, built_in.field: built_in.read(self._said or {})}

    def for_chat(self) -> dict[str, Any]:
        """The call in chat's form: as the model has made it."""
        said = BUILT_IN[self._tool].read(self._said or {})
        known = BUILT_IN[self._tool].properties
        arguments = {name: value for name, value in said.items() if name in known and value not in (None, {})}
        function = {"name": self._tool, "arguments": json_text(arguments, "input")}
        return {"id": self.call_id, "type": "function", "function": function}

    @property
    def _tool(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def _said(self) -> dict[str, Any] | None:
        return self.action if BUILT_IN[self._tool].field == "action" else self.operation


class CallOutputItem(ClientModel):
    """What a tool has answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str = Field(default_factory=lambda: new_id("fco"))
    call_id: str
    output: Output

    def listed(self) -> dict[str, Any]:
        """The item as the API lists it."""
        output = "\n".join(texts(self.output))
        return {"id": self.id, "type": self.type, "call_id": self.call_id, "output": output, "status": "completed"}

    def for_chat(self) -> dict[str, Any]:
        """The message in chat's form."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": chat_content(self.output)}


class ShellOutput(ClientModel):
    """What one command has written, and how it ended."""

    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        code = self.outcome.get("exit_code")
        end = "timed out" if self.outcome.get("type") == "timeout" else f"exit code {code}" if code is not None else ""
        return "\n".join(part for part in (self.stdout, self.stderr, end) if part)


class BuiltInOutputItem(ClientModel):
    """What one of `BUILT_IN` has answered. A local shell's may have the call's id for its own."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    id: str | None = None
    call_id: str | None = None
    status: str = "completed"
    output: (
        Annotated[
            Annotated[str, Tag("$string")]
            | Annotated[list[ShellOutput], fail_fast, at_most(MAX_PARTS, "outputs"), Tag("$array")],
            json_type("a string or an array of outputs"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _answers_a_call(self) -> Self:
        if self.call_id is None and self.id is None:
            raise PydanticCustomError("rule", "is required", {"field": "call_id"})
        return self

    def listed(self) -> dict[str, Any]:
        """The item as the API lists it."""
        item = self.model_dump(exclude_none=True)
        return {**item, "id": self.id or new_id("out"), "call_id": self.call_id or self.id}

    def for_chat(self) -> dict[str, Any]:
        """The message in chat's form."""
        given = self.output or ""
        text = given if isinstance(given, str) else "\n".join(each.text for each in given)
        return {"role": "tool", "tool_call_id": self.call_id or self.id, "content": text or self.status}
