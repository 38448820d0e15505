"""Wire formats that are translated into a chat request, and its errors back into their words.

`protocol.anthropic` and `protocol.responses` describe the same conversation as chat completions under other names. So
each has a request model of its own that checks what the client sent and makes a `TranslatedChat` of it, and everything
behind that (template, tools, reasoning, grammars, sampling) exists once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import MAX_STOP_TOKEN_IDS
from protocol.body import ClientModel, at_most
from protocol.errors import ApiError, to_api_error
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import LogitBias, TokenIds

_MAX_SHOWN = 40  # characters of an unknown type that come back


class TranslatedChat(ChatCompletionRequest):
    """A chat request that was written by a dialect. `client_names` are the dialect's names of chat's fields."""

    client_names: ClassVar[Mapping[str, str]] = {}

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """The engine's refusal of this request, with the fields called what this client calls them."""
        error = super().in_client_words(error)
        message, param = _in_words_of(self.client_names, str(error), error.param)
        return InvalidRequest(message, param=param, code=error.code)


C = TypeVar("C", bound=TranslatedChat)


class DialectRequest(ClientModel):
    """Fields that every dialect takes beside its own, under chat's names and with chat's meaning.

    Those of chat's that would change the answer, and have another name in the dialects or none, are refused.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "max_completion_tokens": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "logprobs": (False,),
        "functions": (),
        "function_call": ("none",),
    }

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS, "entries")] | None = None
    seed: int | None = None
    timeout: float | None = Field(default=None, gt=0)  # seconds to the end of the answer
    ttft_timeout: float | None = Field(default=None, gt=0)  # seconds to its first token
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)  # lower runs first

    def chat_fields(self) -> dict[str, Any]:
        """The fields of this class as chat's."""
        fields = {name: getattr(self, name) for name in DialectRequest.model_fields}
        if self.logit_bias is not None:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return fields


def translated(chat: type[C], fields: Mapping[str, Any]) -> C:
    """The chat request with these fields, of which those that are None are absent.

    Raises `ApiError` 400 in the dialect's words if chat refuses one.
    """
    try:
        return chat.model_validate({name: value for name, value in fields.items() if value is not None})
    except (ValidationError, InvalidRequest) as exc:
        error = to_api_error(exc)
    message, param = _in_words_of(chat.client_names, error.message, error.param)
    raise ApiError(error.status, message, param=param, code=error.code)


def type_tag(value: Any) -> str | None:
    """The tag of an object in a union of models by `type`, for pydantic's `Discriminator`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"${kind}"


def check_type(value: Any, kinds: Sequence[str], default: str | None = None) -> None:
    """Refuses an object of another `type` by name. `default` is the type of an object that tells none."""
    if not isinstance(value, dict):
        raise PydanticCustomError("shape", "an object")
    kind = value.get("type", default)
    if kind is None:
        raise PydanticCustomError("rule", f"is required: one of {', '.join(kinds)}", {"field": "type"})
    if kind not in kinds:
        shown = repr(kind[:_MAX_SHOWN]) if isinstance(kind, str) else "no string"
        works = ", ".join(kinds)
        raise PydanticCustomError(
            "rule", f"is {shown}, which is not supported by this server; send {works}", {"field": "type"}
        )


def known_types(*kinds: str, default: str | None = None) -> BeforeValidator:
    """`check_type` for a field, before the object's other fields are looked at."""

    def check(value: Any) -> Any:
        check_type(value, kinds, default)
        return value

    return BeforeValidator(check)


def json_text(value: Any, param: str) -> str:
    """`value` of the field `param` as JSON text: chat has as text what dialects have as a value."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it was read from JSON, so the only thing left is the depth
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from None


def _in_words_of(names: Mapping[str, str], message: str, param: str | None) -> tuple[str, str | None]:
    if param is None:
        return message, None
    head, *rest = param.split(".")
    theirs = names.get(head, head)
    if head == "messages":
        rest = []  # one of a dialect's turns may be several of chat's: the number would mislead
    # Chat wraps what a tool is into `function`, dialects do not.
    theirs = ".".join([theirs, *(names.get(part, part) for part in rest if part != "function")])
    if message.startswith(param):
        return theirs + message[len(param) :], theirs
    return re.sub(rf"\b{re.escape(head)}\b", names.get(head, head), message, count=1), theirs
