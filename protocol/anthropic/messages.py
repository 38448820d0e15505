"""Requests, tools and errors of /v1/messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest, PromptTooLong
from engine.messages import MAX_STOP_STRINGS
from protocol.anthropic import blocks
from protocol.body import ClientModel, OneOf, at_most, at_most_bytes, at_most_inside, fail_fast, type_of
from protocol.errors import ApiError
from protocol.openai.chat import MAX_MESSAGES
from protocol.openai.generation import NO_LIMIT
from protocol.tools.kinds import KINDS, MAX_TOOL_BYTES, MAX_TOOLS
from protocol.tools.unsupported import IgnoredParts, UnsupportedEntry, types_of
from protocol.translation import DialectRequest, TranslatedChat, chat_request

# ---------------------------------------------------------------------------------------------------------------- tools
# Tools that the client runs: its own, and tools with a form that Anthropic has fixed. Anthropic's models know the
# latter; other models are shown functions of the same names and inputs. All calls come back as `tool_use`.


class Tool(ClientModel):
    """A tool that the client runs. `cache_control`, `defer_loading`, `eager_input_streaming`, `input_examples` and
    `allowed_callers` are accepted without effect."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


_TYPE = re.compile(r"(bash|text_editor|memory)_(\d{8})")


class FixedTool(ClientModel):
    """A shell, an editor or a memory, of any version."""

    type: str
    name: str | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        found = _TYPE.fullmatch(self.type)
        assert found is not None
        is_old = found[1] == "text_editor" and found[2] < "20250429"
        return KINDS["text_editor_before_20250429" if is_old else found[1]].for_chat(self.name, strict=self.strict)


def _kind(tool: Any) -> Any:
    kind = type_of(tool)
    return FixedTool if isinstance(kind, str) and _TYPE.fullmatch(kind) else kind


Tools = Annotated[
    list[Annotated[Tool | FixedTool | UnsupportedEntry, OneOf(default="custom", kind_of=_kind)]],
    fail_fast,
    at_most_bytes(MAX_TOOL_BYTES),
    at_most(MAX_TOOLS, "tools"),
]


MIN_THINKING = 1024  # tokens


class MessagesChat(TranslatedChat):
    """The chat request made from a messages request."""

    client_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
        "continue_final_message": "messages",
        "parameters": "input_schema",
    }

    thinks: bool

    def template_variables(self) -> dict[str, Any]:
        return {"enable_thinking": self.thinks} | super().template_variables()

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error of a too long prompt in Anthropic's words: agents then compact the conversation."""
        if isinstance(error, PromptTooLong):
            maximum = min(error.max_model_len, error.num_tokens - 1)  # a prompt that fills the context is refused, too
            message = f"prompt is too long: {error.num_tokens} tokens > {maximum} maximum"
            return InvalidRequest(message, param="messages", code=error.code)
        return super().in_client_words(error)


class ToolChoice(ClientModel):
    """The choice between tools and text."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("rule", "is required: the tool to call", {"field": "name"})
        return self

    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(ClientModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=MIN_THINKING)
    display: Literal["summarized", "omitted"] = "summarized"

    @model_validator(mode="after")
    def _a_budget_if_enabled(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            raise PydanticCustomError("rule", "is required with type enabled", {"field": "budget_tokens"})
        return self


class OutputFormat(ClientModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClientModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(DialectRequest):
    """The body of POST /v1/messages/count_tokens: the fields of a messages request that make its prompt.

    `metadata`, `cache_control` and `service_tier` are accepted without effect.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**DialectRequest.unsupported, "stop": ()}
    labels: ClassVar[frozenset[str]] = DialectRequest.labels | {"cache_control"}

    messages: Annotated[
        list[blocks.Turn],
        fail_fast,
        at_most_inside(blocks.MAX_BLOCKS_IN_ALL, "blocks"),
        at_most(MAX_MESSAGES, "messages"),
    ] = Field(min_length=1, examples=[[{"role": "user", "content": "What is a headrace?"}]])
    system: blocks.Text | None = None
    tools: Tools = Field(default_factory=list)
    mcp_servers: Annotated[list[Any], at_most(MAX_TOOLS, "servers")] = Field(default_factory=list)  # without effect
    container: Any = None  # without effect
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`

    @model_validator(mode="before")
    @classmethod
    def _has_the_whole_conversation(cls, data: Any) -> Any:
        # The SDK's tool runner asks for a thread; if that were accepted, it would send its second turn alone.
        if isinstance(data, dict) and data.get("thread") is not None:
            message = "thread is not supported by this server, which keeps no messages; send all of them instead."
            raise InvalidRequest(message, param="thread", code=THREADS_UNSUPPORTED)
        return data

    @model_validator(mode="after")
    def _blocks_are_in_their_places(self) -> Self:
        if (wrong := blocks.misplaced_block(self.messages)) is not None:
            param, complaint = wrong
            raise InvalidRequest(f"{param}: {complaint}.", param=param)
        return self

    @property
    def left_out(self) -> IgnoredParts:
        servers = ("mcp",) if self.mcp_servers else ()
        container = () if self.container is None else ("container",)
        items = container + types_of(blocks.with_results(self.messages))
        return IgnoredParts(types_of(self.tools) + servers, items, self.without_effect)

    def translate(self) -> MessagesChat:
        return chat_request(MessagesChat, self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        messages = blocks.chat_messages(self.messages)
        if not messages:
            raise InvalidRequest("messages has no supported content block; add a text block.", param="messages")
        if self.system is not None and (text := blocks.system_text(self.system)):
            messages.insert(0, {"role": "system", "content": text})
        choice = self.tool_choice or ToolChoice(type="auto")
        parallel = not choice.disable_parallel_tool_use
        fields = {
            **super().chat_fields(),
            "messages": messages,
            "tools": [tool.for_chat() for tool in self.tools],
            "tool_choice": choice.for_chat(),
            "parallel_tool_calls": parallel,
        }
        if calls := blocks.unanswered_calls(self.messages[-1]):
            raise InvalidRequest(
                f"messages.{len(self.messages) - 1}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {calls}. Each `tool_use` block must have a corresponding `tool_result` block in "
                "the next message.",
                param="messages",
            )
        is_said = {"continue_final_message", "add_generation_prompt"} & self.model_fields_set
        if messages[-1]["role"] == "assistant" and not is_said:  # the client has begun the answer
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        config = self.output_config or OutputConfig()
        if (form := config.format or self.output_format) is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        is_off = self.thinking is not None and not thinks
        budget = self.thinking.budget_tokens if thinks and self.thinking else None
        return {
            **fields,
            "reasoning_effort": "none" if is_off else config.effort or self.reasoning_effort,
            "thinking_token_budget": self.thinking_token_budget if budget is None else budget,
            "thinks": thinks,
        }


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(examples=[256])
    stop_sequences: Annotated[list[str], at_most(MAX_STOP_STRINGS, "entries")] = Field(default_factory=list)

    @model_validator(mode="after")
    def _thoughts_leave_room(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens != NO_LIMIT:
            raise InvalidRequest(
                f"thinking.budget_tokens must be less than max_tokens ({self.max_tokens}), got {budget}.",
                param="thinking.budget_tokens",
            )
        return self

    @property
    def shows_thinking(self) -> bool:
        """True if the client wants to read the thoughts; otherwise an empty block stands for them."""
        return self.thinking is None or self.thinking.display != "omitted"

    def chat_fields(self) -> dict[str, Any]:
        return {**super().chat_fields(), "max_tokens": self.max_tokens, "stop": self.stop_sequences or None}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

THREADS_UNSUPPORTED = "thread_unsupported_request"
"""The code of the refusal after which Anthropic's SDKs send the whole conversation."""

_CODES = (THREADS_UNSUPPORTED,)  # codes of ours that Anthropic has, too


def envelope(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the error in Anthropic's form. It has no place for `param`; the message names the field."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = {"type": kind, "message": error.message}
    details = {"details": {"error_code": error.code}} if error.code in _CODES else {}
    return {"type": "error", "error": {**said, **details}, "request_id": request_id}


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    return orjson.dumps(envelope(error, request_id))
