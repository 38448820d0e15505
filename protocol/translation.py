"""Wire formats that are translated into a chat request, and its errors back into their words.

`protocol.anthropic` and `protocol.responses` describe the same conversation as chat completions under other names. So
each has a request model of its own that checks what the client sent and makes a `TranslatedChat` of it, and everything
behind that (template, tools, reasoning, grammars, sampling) exists once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from engine.errors import InvalidRequest
from protocol.errors import ApiError, to_api_error
from protocol.openai.chat import ChatCompletionRequest
from protocol.request_fields import RequestFields


class TranslatedChat(ChatCompletionRequest):
    """A chat request that was written by a dialect. `client_names` are the dialect's names of chat's fields."""

    client_names: ClassVar[Mapping[str, str]] = {}

    def check_template_kwargs(self, allowed: Collection[str]) -> None:
        """They are the dialect's, not the client's."""

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """The engine's refusal of this request, with the fields called what this client calls them."""
        error = super().in_client_words(error)
        message, param = _in_words_of(self.client_names, str(error), error.param)
        return InvalidRequest(message, param=param, code=error.code)


C = TypeVar("C", bound=TranslatedChat)


class DialectRequest(RequestFields):
    """A request of a dialect. Of chat's other fields, those that would change the answer are refused, unless the
    dialect has them."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "response_format": ({"type": "text"},),
        "bad_words": ([],),
        "logprobs": (False,),
        "function_call": ("none",),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
        **dict.fromkeys(("max_completion_tokens", "allowed_token_ids", "functions", "logprob_token_ids"), ()),
    }

    def chat_fields(self) -> dict[str, Any]:
        """The fields of this request that chat has under the same names."""
        fields = {name: getattr(self, name) for name in RequestFields.model_fields if name in self.model_fields_set}
        if self.logit_bias is not None:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return fields


def chat_request(chat: type[C], fields: Mapping[str, Any]) -> C:
    """The chat request with these fields, of which those that are None are absent.

    Raises `ApiError` 400 in the dialect's words if chat refuses one.
    """
    try:
        return chat.model_validate({name: value for name, value in fields.items() if value is not None})
    except (ValidationError, InvalidRequest) as exc:
        error = to_api_error(exc)
    message, param = _in_words_of(chat.client_names, error.message, error.param)
    raise ApiError(error.status, message, param=param, code=error.code)


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
