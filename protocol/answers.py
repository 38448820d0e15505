"""Shapes of answers, writers, and frames of event streams.

A shape (`Answer`) has exactly the keys of its fields. One that a dialect's SDKs define (`OpenAnswer`) may have more;
its fields are always present. This module has what all dialects share; the rest is in their folders.
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


class ErrorObject(Answer):
    """An error. `param` is the wrong field, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Answer):
    """The body of an error, unless the dialect has its own."""

    error: ErrorObject


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class TokenizerInfo(OpenAnswer):
    """The answer of GET /tokenizer_info, which has the contents of the tokenizer's files, too."""

    tokenizer_class: str
    chat_template: str | None


class InputTokens(OpenAnswer):
    input_tokens: int


class Version(Answer):
    version: str


class Load(Answer):
    """`server_load`: requests that are being answered."""

    server_load: int


class Alive(Answer):
    alive: bool


class Status(Answer):
    """The progress of the server's start or end."""

    phase: Literal["starting", "ready", "leaving", "stopping", "failed"]
    task: str | None
    done: int
    total: int | None
    elapsed_seconds: float
    queue_full: bool


class ServerInfo(OpenAnswer):
    version: str
    models: list[str]
    max_model_len: int
    vocab_size: int
    embedding_size: int
    default_sampling_params: dict[str, float | None]


class EngineState(Answer):
    """The answer of GET /engine_state: a snapshot of each live engine, by its number."""

    engines: dict[str, dict[str, Any]]


class Success(Answer):
    success: bool


class Trace(Answer):
    """The answer of POST /stop_profile, which Perfetto and chrome://tracing open. Each `pid` is one engine."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


class Aborted(Answer):
    """`aborted`: the number of requests that had one of the ids."""

    aborted: int


class ModelStates(Answer):
    """The states of several models by name: unloaded, loading, loaded, unloading or failed."""

    models: dict[str, str]


class LogLevel(Answer):
    """`log_level`: the least severity that is logged."""

    log_level: str


class Timeline(OpenAnswer):
    """The events of a request."""


# -------------------------------------------------------------------------------------------------------------- writers
# Every dialect has a writer for its event stream and one for its whole body.
#
# Writers do no I/O and read no clock. They raise `ApiError` for an output that failed: before the first byte the app
# answers it as plain JSON, after it as an error frame.


class Head(NamedTuple):
    """The fields that every chunk of a response repeats. `created` is in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, kw_only=True)
class AnswerContext:
    """The facts of an answer that are known before its first token.

    `decode` turns token ids into text; `hidden_ids` are the special tokens that the text leaves out.
    """

    head: Head
    request_id: str
    prompts: Sequence[list[int]]
    token_bytes: TokenBytes
    decode: Callable[[list[int]], str]
    message_format: MessageFormat
    hidden_ids: Container[int] = frozenset()
    fingerprint: str | None = None  # identifies the model and its computation
    durations: Callable[[], tuple[float, float, float]] = lambda: (0.0, 0.0, 0.0)  # see `RequestStream.durations`

    def parser(self) -> MessageParser:
        return self.message_format.parser(self.token_bytes)


class StreamWriter(Protocol):
    """Writes the event stream of one request."""

    def feed_output(self, output: RequestOutput) -> bytes:
        """Return the frames of `output`, possibly none. Raises `ApiError` if the output failed."""

    def finish_stream(self) -> bytes:
        """Return the last frames, after every choice has finished."""

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput]) -> bytes:
        """Return the last frames after an error. `unsent` are generated outputs that will not be fed."""


class BodyWriter(Protocol):
    """Writes the whole response body of one request."""

    def feed_output(self, output: RequestOutput) -> object:
        """Add the next part of a choice. Raises `ApiError` if the output failed."""

    def body(self) -> bytes:
        """Return the response body, after every choice has finished."""


def raise_if_failed(output: RequestOutput) -> None:
    """Raise the `ApiError` of an output that failed, or `InvalidRequest`. `output.error` is for the log only."""
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


CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""Ends every stream of chat and completions, a failed one too."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip and which keeps proxies from closing the connection."""


def data_frame(payload: bytes) -> bytes:
    """Return one event. JSON has no raw line breaks, so one `data:` line holds any payload."""
    return b"data: " + payload + b"\n\n"


def event_frame(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event with a name, for dialects with clients that read it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
