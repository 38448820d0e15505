"""Requests of /api, and their translation into chat requests, completions and embeddings.

Sampling and length are in `options`. Options of Ollama's runner, such as num_gpu, have no effect, and a header says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from protocol.body import ClientModel, OneOf, RequestBody, at_most, at_most_inside, fail_fast
from protocol.errors import shown
from protocol.openai.chat import MAX_MESSAGES, MAX_PARTS_IN_ALL, ConversationFields
from protocol.openai.completions import MAX_PROMPTS
from protocol.openai.embeddings import EmbeddingRequest
from protocol.openai.generation import NO_LIMIT, GenerationRequest, StopStrings
from protocol.openai.tools import CalledTools, Tools
from protocol.request_fields import EngineRequest
from protocol.tools.unsupported import IgnoredParts, types_of
from protocol.translation import DialectRequest, TranslatedChat, TranslatedCompletion, chat_request

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h|$)"


def _seconds(value: Any) -> Any:
    """Return a duration in seconds: a number, or text such as "5m" or "1h30m"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(rf"-?({_PART})+", value):
        raise PydanticCustomError("rule", f'must be seconds or a duration such as "1h30m", got {shown(value)}')
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, value))
    return -seconds if value.startswith("-") else seconds


KeepAlive = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str)]

_CHAT_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTION_NAMES = {chat: option for option, chat in _CHAT_NAMES.items()}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class ModelOptions(RequestBody):
    """The field `options`. Those without a field here have no effect."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    seed: int | None = None
    num_predict: int | None = None  # -1 and -2: as many as fit
    stop: StopStrings | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = Field(default=None, ge=-1)  # 0: no penalties; -1: they apply to all tokens
    num_ctx: int | None = None

    def for_chat(self) -> dict[str, Any]:
        given = self.model_dump(exclude_unset=True, exclude={"num_ctx", "repeat_last_n"})
        fields = {_CHAT_NAMES.get(name, name): value for name, value in given.items()}
        if self.num_predict == -2:
            fields["max_tokens"] = NO_LIMIT
        return fields | (_NEUTRAL if self.repeat_last_n == 0 else {})

    @property
    def without_effect(self) -> tuple[str, ...]:
        window = ("repeat_last_n",) if self.repeat_last_n not in (None, 0, -1) else ()
        return tuple(f"options.{name}" for name in (*super().without_effect, *window))

    def check_context(self, max_model_len: int) -> None:
        """Raise `InvalidRequest` if `num_ctx` is more than the model's context here: it never loads a model again."""
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            raise InvalidRequest(
                f"options.num_ctx must be at most {max_model_len}, the context of this server, got {self.num_ctx}. "
                "Send less, or start the server with a larger max_model_len.",
                param="options.num_ctx",
            )


_CLIENT_NAMES = {
    **{name: f"options.{name}" for name in ModelOptions.model_fields},
    **{name: f"options.{option}" for name, option in OPTION_NAMES.items()},
    "response_format": "format",
    "reasoning_effort": "think",
}


class OllamaChat(TranslatedChat):
    """The chat request made from Ollama's."""

    client_names: ClassVar[Mapping[str, str]] = _CLIENT_NAMES

    thinks: bool | None = None

    def template_variables(self) -> dict[str, Any]:
        thinks = {} if self.thinks is None else {"enable_thinking": self.thinks}
        return thinks | super().template_variables()


class RawCompletion(TranslatedCompletion):
    """The completion made from a request to /api/generate with `raw`."""

    client_names: ClassVar[Mapping[str, str]] = _CLIENT_NAMES


class OllamaRequest(DialectRequest):
    """The fields of /api/chat and /api/generate. An answer is streamed unless `stream` is false."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: off for name, off in DialectRequest.unsupported.items() if name not in ("logprobs", "top_logprobs")
    }

    stream: bool = True
    format: Annotated[Literal["json", ""] | dict[str, Any], OneOf("json or a JSON Schema")] | None = None
    options: ModelOptions = ModelOptions()
    think: (
        Annotated[bool | Literal["low", "medium", "high", "max"], OneOf("true, false, low, medium, high or max")] | None
    ) = None
    keep_alive: KeepAlive | None = None  # seconds; below 0: for ever
    truncate: bool = True  # leave out the oldest turns of a conversation that is too long
    logprobs: bool = False
    top_logprobs: int = 0

    asks_in: ClassVar[str]  # the field with the prompt

    @property
    def only_loads(self) -> bool:
        """True if the request has no prompt: it loads the model or, with `keep_alive` 0, unloads it."""
        return not getattr(self, self.asks_in)

    def check_fields(self) -> None:
        """Check the fields of a request without a prompt as those of others are. Raises as `translate`."""
        fields = OllamaRequest.chat_fields(self)
        chat = chat_request(OllamaChat, {**fields, "messages": [{"role": "user", "content": "a"}]})
        chat.to_sampling_params(2**31)

    @property
    def left_out(self) -> IgnoredParts:
        return IgnoredParts(fields=self.without_effect + self.options.without_effect)

    def check_model(self, max_model_len: int, *, can_think: bool) -> None:
        """Raise `InvalidRequest` if the model has not what the request needs."""
        self.options.check_context(max_model_len)
        if self.think and not can_think:
            raise InvalidRequest(
                "think: this model does not support thinking. Leave it out or send false.", param="think"
            )

    def chat_fields(self) -> dict[str, Any]:
        fields = {**super().chat_fields(), "stream": self.stream, **self.options.for_chat()}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        if self.think is not None:
            effort = self.think if isinstance(self.think, str) else None if self.think else "none"
            fields |= {"thinks": self.think is not False, "reasoning_effort": effort or self.reasoning_effort}
        return fields | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}


class OllamaMessage(ClientModel):
    """One turn. A result of a tool names the tool, or the call if that has an id."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: CalledTools | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    asks_in: ClassVar[str] = "messages"

    messages: Annotated[
        list[OllamaMessage], fail_fast, at_most_inside(MAX_PARTS_IN_ALL, "calls"), at_most(MAX_MESSAGES, "messages")
    ] = Field(default_factory=list, examples=[[{"role": "user", "content": "What is a headrace?"}]])
    tools: Tools = Field(default_factory=list)

    @property
    def left_out(self) -> IgnoredParts:
        return super().left_out._replace(tools=types_of(self.tools))

    def translate(self) -> OllamaChat:
        return chat_request(OllamaChat, self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        fields = {
            **super().chat_fields(),
            "messages": _chat_messages(self.messages),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
        }
        is_said = {"continue_final_message", "add_generation_prompt"} & self.model_fields_set
        last = self.messages[-1]
        if last.role == "assistant" and last.content and not last.tool_calls and not is_said:  # the answer has begun
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields


def _chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat request. Calls without an id get one, which their results repeat."""
    made: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # names by the ids of calls without a result
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            fields["reasoning"] = message.thinking
        if message.tool_calls:
            calls = [call.for_template() for call in message.tool_calls]
            calls = [{"id": f"call_{len(made)}_{number}", **call} for number, call in enumerate(calls)]
            fields["tool_calls"] = calls
            open_calls = {call["id"]: call["function"]["name"] for call in calls}
        if message.role == "tool":
            named = [each for each, name in open_calls.items() if message.tool_name in (None, name)]
            call_id = message.tool_call_id or next(iter(named or open_calls), None)
            open_calls.pop(call_id or "", None)
            fields |= {"name": message.tool_name, "tool_call_id": call_id}
        made.append(fields)
    return made


class GenerateRequest(OllamaRequest):
    """The body of POST /api/generate: one turn, or with `raw` a text to continue."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **OllamaRequest.unsupported,
        **dict.fromkeys(("suffix", "template"), ("",)),
        **dict.fromkeys(("images", "context"), ([],)),
    }

    asks_in: ClassVar[str] = "prompt"

    prompt: str = ""
    system: str = ""
    raw: bool = False

    @model_validator(mode="after")
    def _raw_is_as_it_is(self) -> Self:
        for name in ("system", "think"):
            if self.raw and getattr(self, name):
                raise InvalidRequest(f"{name} cannot be combined with raw: true; leave one out.", param=name)
        return self

    @property
    def left_out(self) -> IgnoredParts:
        left_out = super().left_out
        of_chat = self.model_fields_set & (ConversationFields.model_fields.keys() - RawCompletion.model_fields.keys())
        return left_out._replace(fields=(*left_out.fields, *sorted(of_chat))) if self.raw else left_out

    def translate(self) -> GenerationRequest:
        fields = self.chat_fields()
        if self.raw:
            log = fields.pop("top_logprobs") if fields.pop("logprobs") else None
            return chat_request(
                RawCompletion, {"max_tokens": NO_LIMIT, **fields, "prompt": self.prompt, "logprobs": log}
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return chat_request(OllamaChat, {**fields, "messages": messages})


class EmbedRequest(EngineRequest):
    """The body of POST /api/embed. Inputs that are too long are cut at their end, unless `truncate` is false."""

    input: Annotated[
        str | Annotated[list[str], fail_fast, at_most(MAX_PROMPTS, "texts")], OneOf("a string or an array of strings")
    ] = ""
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=1)
    options: ModelOptions = ModelOptions()
    keep_alive: KeepAlive | None = None

    @property
    def texts(self) -> str | list[str]:
        return self.input

    @property
    def left_out(self) -> IgnoredParts:
        sampling = (f"options.{name}" for name in self.options.model_fields_set - {"num_ctx"})
        return IgnoredParts(fields=(*self.without_effect, *sampling, *self.options.without_effect))

    def translate(self) -> EmbeddingRequest:
        cut = {"truncate_prompt_tokens": -1, "truncation_side": "right"} if self.truncate else {}
        fields = {**cut, **self.given(EngineRequest), "input": self.texts, "dimensions": self.dimensions}
        return EmbeddingRequest(**fields)


class PromptEmbedRequest(EmbedRequest):
    """The body of POST /api/embeddings, the older form: the vector of one text, which is not normalized."""

    prompt: str = ""

    @property
    def texts(self) -> str | list[str]:
        return self.prompt


class NamedModelRequest(RequestBody):
    """The body of POST /api/show and /api/pull. `name` is the older name of `model`."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"insecure": (False,)}

    model: str = ""
    name: str = ""
    stream: bool = True
    verbose: bool = False  # without effect: tensors and the vocabulary are not listed

    @property
    def named(self) -> str:
        return self.model or self.name
