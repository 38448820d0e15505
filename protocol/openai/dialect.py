"""OpenAI's own dialect, which every path speaks that no other dialect has."""

from __future__ import annotations

from protocol.dialect import Dialect, GenerationRoute, finds, generates
from protocol.openai.answers import ChatCompletion, Completion, EmbeddingList, ModelCard, ModelList
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.embeddings import EmbeddingRequest
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter

_CHAT = GenerationRoute(
    path="/v1/chat/completions",
    summary="Answer a conversation.",
    request=ChatCompletionRequest,
    answer=ChatCompletion,
    id_prefix="chatcmpl-",
    stream_writer=ChoicesStreamWriter,
    body_writer=ChoicesBodyWriter,
)
_COMPLETIONS = GenerationRoute(
    path="/v1/completions",
    summary="Continue texts.",
    request=CompletionRequest,
    answer=Completion,
    id_prefix="cmpl-",
    stream_writer=ChoicesStreamWriter,
    body_writer=ChoicesBodyWriter,
)
_EMBEDDINGS = "Texts to vectors: pooled hidden states of the served model."

# What it may be is not said, because other clients' are not looked at.
_PAGE = {
    "limit": {"description": "With the header anthropic-version: models of a page, 1 to 1000."},
    "after_id": {"description": "With the header anthropic-version: the model before the page."},
    "before_id": {"description": "With the header anthropic-version: the model behind the page."},
}

OPENAI = Dialect(
    root="",
    generation=(_CHAT, _COMPLETIONS),
    others=(
        generates("/v1/embeddings", _EMBEDDINGS, EmbeddingRequest, EmbeddingList, streams=False),
        finds("get", "/v1/models", "What is served.", ModelList, query=_PAGE),
        finds("get", "/v1/models/{id}", "One served model; its id may hold slashes.", ModelCard),
    ),
)
