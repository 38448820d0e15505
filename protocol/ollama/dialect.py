"""The dialect's record, and the shapes of its answers; see `protocol.answers`."""

from __future__ import annotations

from typing import Any

from protocol.answers import OpenAnswer, Version
from protocol.ollama.output import KEEP_ALIVE, STREAM_TYPE, error_body, error_line
from protocol.ollama.requests import (
    EmbedRequest,
    GenerateRequest,
    NamedModelRequest,
    OllamaChatRequest,
    PromptEmbedRequest,
)
from protocol.operations import Dialect, Operation, asks, finds, generates

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama with the fields of this dialect, the first with logprobs. Copilot wants at least 0.6.4."""


class OllamaError(OpenAnswer):
    error: str


class ModelAnswer(OpenAnswer, kw_only=True):
    """An answer, or the last line of a stream, which has the text in `message` or `response`.

    Durations are nanoseconds and add up to `total_duration`; `load_duration` ends when the engine begins.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str


class Vectors(OpenAnswer):
    model: str
    embeddings: list[list[float]]


class Vector(OpenAnswer):
    embedding: list[float]


class ModelEntries(OpenAnswer):
    models: list[dict[str, Any]]


class ShownModel(OpenAnswer):
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class PullStatus(OpenAnswer):
    status: str


_EMBED = "Texts to vectors, as Ollama does."

OLLAMA = Dialect(
    root="/api",
    others=(
        generates("/api/chat", "Answer a conversation, as Ollama does.", OllamaChatRequest, ModelAnswer),
        generates("/api/generate", "Answer or continue a text, as Ollama does.", GenerateRequest, ModelAnswer),
        generates("/api/embed", _EMBED, EmbedRequest, Vectors, streams=False),
        generates(
            "/api/embeddings", f"{_EMBED} The older form, for one text.", PromptEmbedRequest, Vector, streams=False
        ),
        Operation("get", "/api/tags", "The served models, as Ollama lists them.", ModelEntries, errors=(503,)),
        Operation("get", "/api/ps", "The models in memory.", ModelEntries, errors=(503,)),
        asks("/api/show", "One model.", ShownModel, NamedModelRequest),
        finds("post", "/api/pull", "Fetch a model.", PullStatus, request=[NamedModelRequest], streams=True),
        Operation("get", "/api/version", "The version of Ollama that this API is like.", Version),
    ),
    error_body=error_body,
    error_event=error_line,
    error_answer=OllamaError,
    stream_type=STREAM_TYPE,
    keep_alive=KEEP_ALIVE,
)
