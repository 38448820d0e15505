"""Requests, and the truncation of long conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from protocol.body import ClientModel, OneOf, at_most
from protocol.openai.chat import ChatMessage
from protocol.openai.generation import StopStrings
from protocol.openai.structured import TextFormat
from protocol.request_fields import Metadata
from protocol.responses.items import Item, ItemReference, Items, MessageItem, chat_messages, with_outputs
from protocol.responses.tools import CallForm, ToolChoice, Tools, call_forms, chat_choice, chat_tools, unsupported_tools
from protocol.tools.unsupported import IgnoredParts, UnsupportedEntry, types_of
from protocol.translation import DialectRequest, TranslatedChat, chat_request

ADDED = "additional_tools"  # the type of an item
LOGPROBS = "message.output_text.logprobs"

_ECHOED = (
    *("frequency_penalty", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("presence_penalty", "previous_response_id", "prompt_cache_key", "safety_identifier", "temperature"),
    *("top_logprobs", "top_p", "truncation", "user"),
)


FindItem = Callable[[ItemReference], Item | None]
"""Looks up an item of an earlier response."""


class ResponsesChat(TranslatedChat):
    """The chat request made from a Responses request."""

    client_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }


class JsonObject(ClientModel):
    type: Literal["json_object"]


class JsonSchema(ClientModel):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[TextFormat | JsonObject | JsonSchema, OneOf()]


class TextConfig(ClientModel):
    """The format of the answer's text. `verbosity` is accepted without effect."""

    format: Format = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] = "medium"


class Reasoning(ClientModel):
    """The effort of reasoning. Other fields are accepted without effect: thoughts are shown as they are."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


def _found(number: int, reference: ItemReference, find: FindItem) -> Item:
    item = find(reference)
    if item is None:
        param = f"input.{number}.id"
        raise InvalidRequest(
            f"{param} is not the id of an item of a response that is kept here; send the item itself.", param=param
        )
    return item


class InputTokensRequest(DialectRequest):
    """The body of POST /v1/responses/input_tokens: the fields of a request that make its prompt."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **DialectRequest.unsupported,
        "messages": (),
        "max_tokens": (),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "truncation": ("disabled",),
    }

    input: Annotated[str | Items, OneOf("a string or an array of items")] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    text: TextConfig = Field(default_factory=TextConfig)

    @model_validator(mode="before")
    @classmethod
    def _tools_of_the_conversation_are_tools(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("input"), list):
            return data
        tools = data.get("tools") or []
        added: list[Any] = [
            item.get("tools") for item in data["input"] if isinstance(item, dict) and item.get("type") == ADDED
        ]
        if not isinstance(tools, list) or not all(isinstance(more, list) for more in added):
            return data
        return {**data, "tools": [*tools, *chain(*added)]}

    @property
    def left_out(self) -> IgnoredParts:
        items = types_of(with_outputs(self.input)) if isinstance(self.input, list) else ()
        items = tuple(kind for kind in items if kind != ADDED)
        return IgnoredParts(types_of(unsupported_tools(self.tools)), items, self.without_effect)

    def call_forms(self) -> dict[str, CallForm]:
        return call_forms(self.tools)

    def items(self, find: FindItem = lambda reference: None) -> list[Item]:
        """Return the input as items; none if a response is continued without input.

        `find` looks up references. Raises `InvalidRequest` if one is not found.
        """
        if self.input is None:
            if self.previous_response_id is None:
                raise InvalidRequest("input is required without previous_response_id.", param="input")
            return []
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return [
            _found(number, item, find) if isinstance(item, ItemReference) else item
            for number, item in enumerate(self.input)
            if not isinstance(item, UnsupportedEntry)
        ]

    def translate(self, items: Sequence[Item] | None = None) -> ResponsesChat:
        """Return the chat request. `items` are the conversation without instructions; by default, the request's."""
        items = self.items() if items is None else items
        if not items:
            raise InvalidRequest("input must have at least one item.", param="input")
        messages = chat_messages(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return chat_request(ResponsesChat, {**self.chat_fields(), "messages": messages})

    def chat_fields(self) -> dict[str, Any]:
        fields = {
            **super().chat_fields(),
            "tools": chat_tools(self.tools),
            "tool_choice": chat_choice(self.tool_choice, self.tools),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort or self.reasoning_effort,
        }
        match self.text.format:
            case JsonObject():
                fields["response_format"] = {"type": "json_object"}
            case JsonSchema() as form:
                schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class ResponsesRequest(InputTokensRequest):
    """The body of POST /v1/responses.

    `service_tier`, `max_tool_calls` (it counts tools that OpenAI runs), `prompt_cache_key`, `safety_identifier` and
    `user` are accepted without effect and come back in the response, as does `metadata`.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: off
        for name, off in InputTokensRequest.unsupported.items()
        if name not in ("background", "truncation", "top_logprobs")
    }

    max_output_tokens: int | None = None
    truncation: Literal["disabled", "auto"] = "disabled"
    stop: StopStrings | None = None
    top_logprobs: int = Field(default=0, ge=0)
    include: Annotated[list[str], at_most(64, "entries")] = Field(default_factory=list)
    store: bool | None = None
    background: bool = False
    metadata: Metadata = Field(default_factory=dict)
    max_tool_calls: int | None = Field(default=None, ge=0)
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer's text comes with log-probabilities."""
        return LOGPROBS in self.include or self.top_logprobs > 0

    def chat_fields(self) -> dict[str, Any]:
        return {
            **super().chat_fields(),
            "stream": self.stream or self.background,  # in the background, the events are kept
            "max_tokens": self.max_output_tokens,
            "stop": self.stop,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }

    def echo(self) -> dict[str, Any]:
        """Return the request's fields in the response object: every key, null where the client set nothing."""
        return {name: getattr(self, name) for name in _ECHOED} | {
            "background": self.background,
            "reasoning": {
                "effort": self.reasoning.effort,
                "summary": None if self.reasoning.summary == "none" else self.reasoning.summary,
            },
            "service_tier": "default",
            "text": {"format": self.text.format.model_dump(by_alias=True), "verbosity": self.text.verbosity},
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools if not isinstance(tool, UnsupportedEntry)],
        }


# ----------------------------------------------------------------------------------------------------------- truncation
# `truncation: auto`: a conversation that is too long loses its oldest turns until it fits.


_INSTRUCTIONS = ("system", "developer")

T = TypeVar("T")


def beginnings(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the indices where a truncated conversation may begin: any message except the first and tool results."""
    turns = [place for place, message in enumerate(messages) if message.role not in _INSTRUCTIONS]
    return [place for place in turns[1:] if messages[place].role != "tool"]


def beginning_at(messages: Sequence[ChatMessage], begin: int) -> list[ChatMessage]:
    """Return the conversation from the message `begin` on, with all instructions."""
    return [message for place, message in enumerate(messages) if place >= begin or message.role in _INSTRUCTIONS]


async def fit(messages: Sequence[ChatMessage], encode: Callable[[list[ChatMessage]], Awaitable[T | None]]) -> T | None:
    """Return the result of `encode` for the longest conversation that fits; None if not even the last turn fits.

    `encode` returns None for messages that are too long. It is called for the whole list, then in a binary search.
    """
    found = await encode(list(messages))
    if found is not None:
        return found
    begins = beginnings(messages)
    first, last = 0, len(begins)  # the longest that fits begins in this range, or nothing fits
    while first < last:
        middle = (first + last) // 2
        encoded = await encode(beginning_at(messages, begins[middle]))
        if encoded is None:
            first = middle + 1
        else:
            last, found = middle, encoded
    return found
