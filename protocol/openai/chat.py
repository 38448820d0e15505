"""POST /v1/chat/completions: the request, its messages, and the form of its answers.

Content parts must be text; another type is an error that names it, or, in a tool's result, a note for the model. Parts
are joined with a line break, as in vLLM, unless the chat template reads parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from msgspec import structs
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import SamplingParams
from protocol.body import ClientModel, OneOf, at_most, at_most_bytes, at_most_inside, check_size, fail_fast, refuse_type
from protocol.errors import shown
from protocol.openai import tools as openai_tools
from protocol.openai.answers import AssistantMessage, ChatChoice, ChatCompletion
from protocol.openai.generation import GenerationRequest, WireFormat
from protocol.openai.logprobs import ChatLogprobs
from protocol.openai.structured import BEYOND_GRAMMARS, LEAVES_OUT
from protocol.request_fields import RequestFields
from protocol.syntax.message_parts import MessageFormat
from protocol.tools.kinds import CustomTool, ToolUse
from protocol.tools.unsupported import IgnoredParts, UnsupportedPart, types_of

if TYPE_CHECKING:
    from protocol.syntax.model_syntax import ModelSyntax  # needs the template engine

# Variables of the template that chat_template_kwargs cannot set.
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

MAX_MESSAGES = 16384
MAX_PARTS = 1024  # parts of one message
MAX_PARTS_IN_ALL = 16384  # calls included
MAX_TEMPLATE_KWARGS = 4096  # bytes of JSON
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_BYTES = 2**18  # bytes of JSON, all documents together


class TextPart(ClientModel):
    type: Literal["text"]
    text: str


class RefusalPart(ClientModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart | UnsupportedPart, OneOf()]
Content = Annotated[
    str | Annotated[list[Part], fail_fast, at_most(MAX_PARTS, "parts")], OneOf("a string or an array of text parts")
]


class ChatMessage(ClientModel):
    """One turn of the conversation. Only the assistant's and a tool's may lack content."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"audio": ()}

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: openai_tools.CalledTools | None = None
    function_call: openai_tools.CalledFunction | None = None  # the same in its old form
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same under its older name
    refusal: str | None = None  # instead of content

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, content: str | list[Part] | None, info: ValidationInfo) -> Any:
        # A role that failed its own check is not in info.data: one error is enough.
        role = info.data.get("role", "tool")
        if content is None and role not in ("assistant", "function", "tool"):
            raise PydanticCustomError("rule", "is required: a string or an array of text parts")
        if isinstance(content, list) and role not in ("function", "tool"):
            for number, part in enumerate(content):
                if isinstance(part, UnsupportedPart):
                    refuse_type(part.type, ("text",), f"{number}.type")
        return content

    @field_validator("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")
    @classmethod
    def _only_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("rule", "is only allowed in messages of the assistant")
        return value

    def text(self) -> str:
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)

    def parts(self) -> list[dict[str, Any]]:
        """Return the content as parts of text, at least one."""
        given = self.content or self.refusal or ""
        content = [given] if isinstance(given, str) else [part.text for part in given]
        return [{"type": "text", "text": text} for text in filter(None, content)] or [{"type": "text", "text": ""}]

    def for_template(self, *, as_parts: bool = False) -> dict[str, Any]:
        """Return the message in the form of chat templates: content is a string or parts, absent keys are left out."""
        thought = self.reasoning or self.reasoning_content
        role, call_id, calls = self.role, self.tool_call_id, self.tool_calls
        # Templates know tools, but no functions: a call and its result get an id made of the function's name.
        if role == "function":
            role, call_id = "tool", f"call_{self.name}"
        if self.function_call is not None and not calls:
            calls = [openai_tools.CalledTool(id=f"call_{self.function_call.name}", function=self.function_call)]
        extras = {
            "name": self.name,
            "tool_call_id": call_id,
            "tool_calls": [call.for_template() for call in calls] if calls else None,
            "reasoning": thought,
            "reasoning_content": thought,
        }
        return {"role": role, "content": self.parts() if as_parts else self.text()} | {
            key: value for key, value in extras.items() if value is not None
        }


CHAT = WireFormat(
    chunk_object="chat.completion.chunk",
    whole=ChatCompletion,
    choice=ChatChoice,
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
    chunk_text=lambda text: {"delta": {"content": text}},
    full_text=lambda text: {"message": AssistantMessage(content=text)},
    logprobs=lambda token_bytes, as_token_ids, *_: ChatLogprobs(token_bytes, as_token_ids),
    prompt_in_choice=False,
)


class ConversationFields(RequestFields):
    """The fields of conversations and reasoning that every dialect has under the same names."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    documents: (
        Annotated[
            list[dict[str, Any]], fail_fast, at_most_bytes(MAX_DOCUMENT_BYTES), at_most(MAX_DOCUMENTS, "documents")
        ]
        | None
    ) = None
    add_generation_prompt: bool | None = None  # None: true unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes those that the model wants
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("thinking_token_budget")
    @classmethod
    def _no_budget(cls, budget: int | None) -> int | None:
        if budget is not None and budget < -1:
            raise PydanticCustomError("rule", f"must be at least 0, or -1 for none, got {shown(budget)}")
        return None if budget == -1 else budget

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_kwargs_add_only(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_RESERVED_VARIABLES & variables.keys()):
            raise PydanticCustomError("rule", "is set by the server; leave it out", {"field": taken[0]})
        check_size(variables, MAX_TEMPLATE_KWARGS)
        return variables


class ChatCompletionRequest(ConversationFields, GenerationRequest):
    """The body of POST /v1/chat/completions. `max_completion_tokens` wins over `max_tokens`."""

    wire: ClassVar[WireFormat] = CHAT
    prompt_field: ClassVar[str] = "messages"
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationRequest.unsupported,
        "modalities": (["text"],),
        "audio": (),
        "chat_template": (),
    }

    messages: Annotated[
        list[ChatMessage], fail_fast, at_most_inside(MAX_PARTS_IN_ALL, "parts"), at_most(MAX_MESSAGES, "messages")
    ] = Field(min_length=1, examples=[[{"role": "user", "content": "What is a headrace?"}]])
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: openai_tools.Tools = Field(default_factory=list)
    tool_choice: openai_tools.ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: openai_tools.Functions | None = None  # tools in their old form
    function_call: openai_tools.FunctionCall | None = None
    web_search_options: dict[str, Any] | None = None  # without effect, like search tools

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs != 0 and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true.", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _tool_choice_can_be_met(self) -> Self:
        if self.functions is not None and self.tools:
            raise InvalidRequest("functions cannot be combined with tools; send only tools.", param="functions")
        if self.functions is None and isinstance(self.function_call, openai_tools.ToolName):
            raise InvalidRequest("function_call needs functions; send some or leave it out.", param="function_call")
        openai_tools.check_tool_choice(*self._tools, self._tool_fields)
        if self.tool_use is not None and self.tool_use.choice == "required":
            openai_tools.check_demanded_grammars(self.tool_use, self._tool_fields)
        # A demanded call replaces the answer to which a response format applies. Other grammars apply to calls too.
        grammars = self.grammars_asked_for.keys() - {"response_format"}
        if grammars and self.tool_use is not None and self.tool_use.choice == "required":
            name = min(grammars)
            raise InvalidRequest(f"{name} cannot apply to a call that tool_choice demands; leave one out.", param=name)
        return self

    @model_validator(mode="after")
    def _answers_or_continues(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        if self.continue_final_message and not self.messages[-1].text():
            raise InvalidRequest(
                "continue_final_message needs a final message with content to continue.", param="continue_final_message"
            )
        return self

    def check_template_kwargs(self, allowed: Collection[str]) -> None:
        if "*" not in allowed and (refused := sorted(self.chat_template_kwargs.keys() - set(allowed))):
            raise InvalidRequest(
                f"chat_template_kwargs.{refused[0][:40]} may not be set on this server; it takes "
                f"{', '.join(allowed) or 'none'}.",
                param="chat_template_kwargs",
            )

    def echo_texts(self, decode: Callable[[list[int]], str], prompts: Sequence[list[int]]) -> list[str]:
        last = self.messages[-1]
        return [last.text() if last.role == "assistant" else ""]

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools that may be called; None if there are none."""
        tools, choice = self._tools
        return openai_tools.tool_use(tools, choice, parallel=self.parallel_tool_calls and self.functions is None)

    @property
    def answers_in_old_form(self) -> bool:
        return self.functions is not None

    @property
    def _tool_fields(self) -> tuple[str, str]:
        return ("tools", "tool_choice") if self.functions is None else ("functions", "function_call")

    @property
    def _tools(self) -> tuple[Sequence[openai_tools.AnyTool], openai_tools.Choice | None]:
        """The tools and the choice; `functions` are turned into tools."""
        if self.functions is None:
            return self.tools, self.tool_choice
        return openai_tools.tools_of(self.functions, self.function_call)

    def with_syntax(self, sampling: SamplingParams, syntax: ModelSyntax, prompt_end: bytes) -> SamplingParams:
        """Return `sampling` with the grammar of a demanded call, and with special tokens that are tags in the text.

        Stop strings do not apply to a demanded call, because they would truncate its arguments.
        """
        is_required = self.tool_use is not None and self.tool_use.choice == "required"
        return structs.replace(
            sampling,
            stop=() if is_required else sampling.stop,
            structured_output=syntax.grammar(self.tool_use, sampling.structured_output, prompt_end=prompt_end),
            shown_special_tokens=syntax.shown_special_tokens(self.tool_use),
            reasoning_tags=None if sampling.thinking_token_budget is None else syntax.reasoning_tags(prompt_end),
        )

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        if error.param == "structured_output" and self._tools_give_the_grammar:
            field = self._tool_fields[0]
            message = str(error).replace("structured_output", field)
            if BEYOND_GRAMMARS.search(message):
                message += f" Without strict, {LEAVES_OUT}"
            error = InvalidRequest(message, param=field, code=error.code)
        return super().in_client_words(error)

    @property
    def left_out(self) -> IgnoredParts:
        searches = () if self.web_search_options is None else ("web_search",)
        parts = (part for each in self.messages if isinstance(each.content, list) for part in each.content)
        return IgnoredParts(types_of(self.tools) + searches, types_of(parts), self.without_effect)

    @property
    def lark_tools(self) -> tuple[str, ...]:
        """The names of the custom tools with a Lark grammar, which is shown to the model and not enforced."""
        functions = () if self.tool_use is None else self.tool_use.functions
        return tuple(each.name for each in functions if isinstance(each, CustomTool) and each.syntax == "lark")

    @property
    def _tools_give_the_grammar(self) -> bool:
        tools = self.tool_use
        return tools is not None and (tools.choice == "required" or not self.grammars_asked_for)

    @property
    def begins_message(self) -> bool:
        return not self.continue_final_message

    def message_format(self, syntax: ModelSyntax, prompt_end: bytes) -> MessageFormat:
        return syntax.message_format(
            self.tool_use,
            prompt_end=prompt_end,
            num_calls=sum(len(message.tool_calls or ()) for message in self.messages),
            show_reasoning=self.include_reasoning,
            hide_special_tokens=self.skip_special_tokens,
        )

    def messages_for_template(self, *, as_parts: bool = False) -> list[dict[str, Any]]:
        """Return the conversation for `ChatTemplate`; see its `takes_parts`."""
        return [message.for_template(as_parts=as_parts) for message in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """Return the client's variables for the template. As in vLLM, effort `none` also turns thinking off."""
        variables = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        return variables

    def _max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super()._max_tokens()

    def _logprobs(self) -> tuple[str, int | None]:
        return "top_logprobs", self.top_logprobs if self.logprobs else None
