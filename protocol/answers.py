"""Shapes of answers, writers, and frames of event streams.

Shapes are closed (`Answer`), unless a dialect's SDKs define them: then they name what is always there (`OpenAnswer`).
Here is what all dialects share; the rest is in their folders.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import orjson

from engine.messages import FinishReason, RequestOutput
from protocol.errors import ApiError, deadline_exceeded
from protocol.syntax.message_parts import MessageFormat, MessageParser, TokenBytes

encode = msgspec.json.Encoder().encode
"""Writes an `Answer` as JSON."""


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """An object that the server sends."""


class OpenAnswer(msgspec.Struct):
    """An object that may have more keys than are named."""


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


# -------------------------------------------------------------------------------------------------------------- writers
# What writes an answer: a writer for its event stream, or one for its one body. Every dialect has both.
#
# Writers do no I/O and know no time. They raise `ApiError` for an output that failed: before the first byte the app
# answers it as plain JSON, after it as an error frame.


class Head(NamedTuple):
    """What every chunk of a response repeats. `created` is in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, kw_only=True)
class AnswerContext:
    """What is known of an answer before its first token.

    `decode` turns token ids into text; `hidden_ids` are the special tokens that the text leaves out.
    """

    head: Head
    request_id: str
    prompts: Sequence[list[int]]
    token_bytes: TokenBytes
    decode: Callable[[list[int]], str]
    message_format: MessageFormat
    hidden_ids: Container[int] = frozenset()
    fingerprint: str | None = None  # of the model and of how it is computed

    def parser(self) -> MessageParser:
        """A parser for one choice."""
        return self.message_format.parser(self.token_bytes)


class StreamWriter(Protocol):
    """Turns the outputs of one request into the frames of its event stream."""

    def feed_output(self, output: RequestOutput) -> bytes:
        """The frames that `output` gives, possibly none. Raises `ApiError` if the output failed."""
        ...

    def finish_stream(self) -> bytes:
        """The last frames, after every choice has finished."""
        ...

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput]) -> bytes:
        """The last frames if something goes wrong. `unsent` has been generated and will not be fed."""
        ...


class BodyWriter(Protocol):
    """Turns the outputs of one request into its one response body."""

    def feed_output(self, output: RequestOutput) -> object:
        """Take in the next part of a choice. Raises `ApiError` if the output failed."""
        ...

    def body(self) -> bytes:
        """The response body, after every choice has finished."""
        ...


def raise_if_failed(output: RequestOutput) -> None:
    """Raise the `ApiError` of an output that ended in failure, or InvalidRequest if the client has to change something.

    `output.error` is for the log and stays out of it.
    """
    if output.finish_reason is FinishReason.TIMEOUT:
        raise deadline_exceeded("The request cannot be done within its deadline.")
    if output.refusal is not None:
        raise output.refusal.as_error()
    if output.rank_lost is not None:
        raise ApiError(
            503,
            f"The engine of this request has ended: {output.rank_lost}. It is started again; the request may be sent "
            "again.",
            code="rank_lost",
            headers={"retry-after": "2"},
        )
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, "The request failed inside the server. It may be sent again.", code="request_failed")


# ------------------------------------------------------------------------------------------------------------------ sse
# Frames of a `text/event-stream` body. Imported by the streamed wire formats and by the app's streams.


CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""Ends every stream of chat and completions, one that failed too."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def data_frame(payload: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds any payload."""
    return b"data: " + payload + b"\n\n"


def event_frame(name: str, data: Mapping[str, Any]) -> bytes:
    """One event with a name, for wire formats whose clients go by it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
