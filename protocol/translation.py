"""Dialects that are translated into a chat request, and its errors, translated back into the dialect's names.

`protocol.anthropic` and `protocol.responses` describe a conversation under other names than chat completions. A request
model of each checks the client's body and makes a `TranslatedChat`, so that template, tools, reasoning, grammars and
sampling exist once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from engine.errors import InvalidRequest
from protocol.errors import ApiError, to_api_error
from protocol.openai.chat import ChatCompletionRequest, ConversationFields
from protocol.openai.completions import CompletionRequest
from protocol.openai.generation import GenerationRequest
from protocol.openai.structured import StructuredOutputFields


class _Translated(GenerationRequest):
    """A request made from a dialect's. `client_names` are the dialect's names of its fields."""

    client_names: ClassVar[Mapping[str, str]] = {}

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        error = super().in_client_words(error)
        message, param = _in_words_of(self.client_names, str(error), error.param)
        return InvalidRequest(message, param=param, code=error.code)


class TranslatedChat(ChatCompletionRequest, _Translated):
    """A chat request made from a dialect's."""


class TranslatedCompletion(CompletionRequest, _Translated):
    """A completion made from a dialect's request."""


C = TypeVar("C", bound=_Translated)


class DialectRequest(ConversationFields, StructuredOutputFields):
    """A request of a dialect, with the common fields, which `chat_fields` passes to chat.

    It refuses fields that chat refuses, and fields with effects that the dialect's answers cannot show.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ChatCompletionRequest.unsupported,
        **dict.fromkeys(("n", "best_of"), (1,)),
        "response_format": ({"type": "text"},),
        **dict.fromkeys(("logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
        "top_logprobs": (0,),
        "function_call": ("none",),
        **dict.fromkeys(("max_completion_tokens", "functions", "logprob_token_ids", "prompt_logprobs"), ()),
    }
    labels: ClassVar[frozenset[str]] = ConversationFields.labels | {"stream_options"}  # usage always comes

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of this request that chat has under the same names."""
        fields = self.given(DialectRequest)
        if self.logit_bias is not None:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return fields


def chat_request(chat: type[C], fields: Mapping[str, Any]) -> C:
    """Return a chat request, or a completion, with those `fields` that are not None.

    Raises `ApiError` 400 with the dialect's names if chat refuses one.
    """
    try:
        return chat.model_validate({name: value for name, value in fields.items() if value is not None})
    except (ValidationError, InvalidRequest) as exc:
        error = to_api_error(exc)
    message, param = _in_words_of(chat.client_names, error.message, error.param)
    raise ApiError(error.status, message, param=param, code=error.code)


def _in_words_of(names: Mapping[str, str], message: str, param: str | None) -> tuple[str, str | None]:
    if param is None or param in names.values():  # or it is in the dialect's words already
        return message, param
    head, *rest = param.split(".")
    theirs = names.get(head, head)
    if head == "messages":
        rest = []  # one of a dialect's turns may be several of chat's: the number would mislead
    # Chat nests a tool's fields in `function`; dialects do not.
    theirs = ".".join([theirs, *(names.get(part, part) for part in rest if part != "function")])
    if message.startswith(param):
        return theirs + message[len(param) :], theirs
    return re.sub(rf"\b{re.escape(head)}\b", names.get(head, head), message, count=1), theirs
