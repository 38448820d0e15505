"""The shapes of answers, for /openapi.json and for tests that hold the server to them.

Answers are written by hand where they are made, because that is on the path of every request; nothing here runs then,
and pydantic builds nothing of it before somebody asks.
Objects are closed: a key that is written and not named here is a mistake. Shapes that a dialect's SDKs define are
described by what always is there. Here is what all dialects share; the rest is in their folders.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An object that the server sends."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)


class OpenAnswer(Answer):
    """One that may have more keys than are named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)


# --- errors


class ErrorObject(Answer):
    """What went wrong. `param` is the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Answer):
    """The body of every error, where a dialect has no other."""

    error: ErrorObject


# --- tokens


class Tokens(Answer):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(OpenAnswer):
    """The answer of GET /tokenizer_info: besides, what the tokenizer's files say."""

    tokenizer_class: str
    chat_template: str | None


class InputTokens(OpenAnswer):
    input_tokens: int


# --- the server itself


class Version(Answer):
    version: str


class Load(Answer):
    """`server_load`: requests that are being answered."""

    server_load: int


class Alive(Answer):
    alive: bool


class Status(Answer):
    """How far the server is."""

    phase: Literal["starting", "ready", "leaving", "stopping", "failed"]
    task: str | None
    done: int
    total: int | None
    elapsed_seconds: float
    queue_full: bool


class ServerInfo(OpenAnswer):
    """The answer of GET /server_info."""

    version: str
    models: list[str]
    max_model_len: int
    vocab_size: int
    embedding_size: int
    default_sampling_params: dict[str, float | None]


class EngineState(Answer):
    """The answer of GET /engine_state: a snapshot of each engine that lives, by its number."""

    engines: dict[str, dict[str, Any]]


class Success(Answer):
    success: bool


class Trace(Answer):
    """The answer of POST /stop_profile, which Perfetto and chrome://tracing open. A process is an engine."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


class Aborted(Answer):
    """`aborted`: how many requests had one of the ids."""

    aborted: int


class LogLevel(Answer):
    """`log_level`: the least severity that is logged."""

    log_level: str


class Timeline(OpenAnswer):
    """What happened to a request."""
