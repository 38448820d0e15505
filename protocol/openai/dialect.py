"""The dialect's record, and the error of an unknown model."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.answers import DONE, data_frame
from protocol.errors import ApiError
from protocol.openai.answers import ChatCompletion, Completion, EmbeddingList, ModelCard, ModelList
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.embeddings import EmbeddingRequest
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter
from protocol.operations import Dialect, GenerationRoute, finds, generates

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

# Without types, because the values are ignored without that header.
_PAGE = {
    "limit": {"description": "With the header anthropic-version: number of models on a page, 1 to 1000."},
    "after_id": {"description": "With the header anthropic-version: the page begins after this model."},
    "before_id": {"description": "With the header anthropic-version: the page ends before this model."},
}

OPENAI = Dialect(
    root="",
    error_event=lambda error, request_id: data_frame(error.body()) + DONE,
    generation=(_CHAT, _COMPLETIONS),
    others=(
        generates("/v1/embeddings", _EMBEDDINGS, EmbeddingRequest, EmbeddingList, streams=False),
        finds("get", "/v1/models", "The served models.", ModelList, query=_PAGE),
        finds("get", "/v1/models/{id}", "One served model; its id may hold slashes.", ModelCard),
    ),
)


def find_model(name: str, served: Sequence[str]) -> str:
    """Return the served model that a client's name means: clients of Ollama may add ``:latest``. Raises 404."""
    for each in (name, name.removesuffix(":latest")):
        if each in served:
            return each
    raise unknown_model(name, served)


_MAX_SHOWN = 64  # characters of an unknown name that the error repeats


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """Return the 404 of a request for a model that is not `served`."""
    shown = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "…"
    return ApiError(
        404,
        f"The model `{shown}` does not exist. Served here: {', '.join(served)}."
        if served
        else "No model is served here that this client may use.",
        param="model",
        code="model_not_found",
    )
