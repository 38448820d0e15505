"""Every route as clients see it, in the order in which /docs shows them.

A test compares this table with the routes that the application has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from protocol import answers
from protocol.administration import AbortRequest
from protocol.anthropic.messages import CountTokensRequest, MessagesRequest
from protocol.body import ClientModel
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.embeddings import EmbeddingRequest
from protocol.responses.request import InputTokensRequest, ResponsesRequest
from protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

Method = Literal["get", "post", "delete"]


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    A body is one of the models of `request`. `answer` is the body's model or its content type, None for an empty body;
    statuses in `also` have the same. `errors` are those beside 401, which all have that are not `is_open`.
    """

    method: Method
    path: str
    summary: str
    answer: type[BaseModel] | str | None
    request: Sequence[type[ClientModel]] = ()
    errors: Sequence[int] = ()
    also: Sequence[int] = ()
    streams: bool = False
    is_open: bool = False


def _generates(path: str, summary: str, request: type[ClientModel], answer: type[BaseModel]) -> Operation:
    return Operation("post", path, summary, answer, [request], (400, 404, 413, 429, 500, 503, 504), streams=True)


def _asks(path: str, summary: str, answer: type[BaseModel], *request: type[ClientModel]) -> Operation:
    return Operation("post", path, summary, answer, request, (400, 404, 413, 503))


def _finds(method: Method, path: str, summary: str, answer: type[BaseModel]) -> Operation:
    return Operation(method, path, summary, answer, errors=(400, 404, 503))


def _probe(path: str, summary: str, answer: type[BaseModel] | None, method: Method = "get") -> Operation:
    return Operation(method, path, summary, answer, also=(503,), is_open=True)


OPERATIONS = (
    _generates("/v1/chat/completions", "Answer a conversation.", ChatCompletionRequest, answers.ChatCompletion),
    _generates("/v1/completions", "Continue texts.", CompletionRequest, answers.Completion),
    _generates(
        "/v1/responses", "Answer items; the response can be continued.", ResponsesRequest, answers.ResponseObject
    ),
    _asks(
        "/v1/responses/input_tokens",
        "Count the tokens that a response would read.",
        answers.InputTokens,
        InputTokensRequest,
    ),
    _finds("get", "/v1/responses/{id}", "A response that was kept.", answers.ResponseObject),
    _finds("delete", "/v1/responses/{id}", "Forget a response.", answers.DeletedResponse),
    _finds("post", "/v1/responses/{id}/cancel", "End a response that is being made.", answers.ResponseObject),
    _finds("get", "/v1/responses/{id}/input_items", "What a response was made from.", answers.ItemList),
    Operation(
        "post",
        "/v1/embeddings",
        "Texts to vectors: pooled hidden states of the served model.",
        answers.EmbeddingList,
        [EmbeddingRequest],
        (400, 404, 413, 429, 500, 503, 504),
    ),
    _finds("get", "/v1/models", "What is served.", answers.ModelList),
    _finds("get", "/v1/models/{id}", "One served model; its id may hold slashes.", answers.ModelCard),
    _generates("/v1/messages", "Answer a conversation, as Anthropic's API does.", MessagesRequest, answers.Message),
    _asks("/v1/messages/count_tokens", "Count its tokens.", answers.InputTokens, CountTokensRequest),
    *(
        _asks(
            f"{prefix}/tokenize",
            "The token ids of a text, or of a conversation.",
            answers.Tokens,
            TokenizeTextRequest,
            TokenizeChatRequest,
        )
        for prefix in ("", "/v1")
    ),
    *(
        _asks(f"{prefix}/detokenize", "The text of token ids.", answers.Detokenized, DetokenizeRequest)
        for prefix in ("", "/v1")
    ),
    _finds("get", "/v1/requests/{id}/timeline", "What happened to one of the last requests.", answers.Timeline),
    _probe("/livez", "Is the process worth keeping?", answers.Alive),
    _probe("/readyz", "Would a request be accepted now?", answers.Status),
    _probe("/startupz", "Is the model loaded?", answers.Status),
    _probe("/health", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None, "post"),
    Operation("get", "/load", "How many requests are being answered.", answers.Load),
    Operation("get", "/version", "The server's version.", answers.Version),
    Operation("get", "/metrics", "Figures for Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This description, for programs.", "application/json"),
    Operation("get", "/docs", "This description, for people.", "text/html"),
)

ADMINISTRATION = (
    Operation("get", "/server_info", "Version, model, engine info and settings.", answers.ServerInfo, errors=(503,)),
    Operation("get", "/engine_state", "What each engine does and holds.", answers.EngineState, errors=(503,)),
    Operation("post", "/reset_prefix_cache", "Forget what was computed.", answers.Success, errors=(503,)),
    Operation("post", "/abort_requests", "End requests by their ids.", answers.Aborted, [AbortRequest], (400, 413)),
)
"""Routes that exist where there are administrators' keys."""
