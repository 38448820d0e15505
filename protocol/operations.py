"""A dialect as one record: its paths, request models, writers and errors.

`protocol.registry` lists the records, from which the app makes handlers and `protocol.openapi` the description. A
request model's `translate` is the way from the dialect to what the server works with; see `protocol.translation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from protocol.answers import AnswerContext, BodyWriter, ErrorEnvelope, InputTokens, StreamWriter
from protocol.body import ClientModel
from protocol.errors import ApiError
from protocol.request_fields import RequestFields

Method = Literal["get", "post", "delete"]
R = TypeVar("R", bound=RequestFields)


@dataclass(frozen=True)
class Operation:
    """One method of one path, as clients see it.

    A body is one of the models of `request`. `answer` is the body's model or its content type, None for an empty body;
    statuses in `also` have the same. `errors` are those beside 401, which all have that are not `is_open`.
    """

    method: Method
    path: str
    summary: str
    answer: type[Struct] | str | None
    request: Sequence[type[ClientModel]] = ()
    errors: Sequence[int] = ()
    also: Sequence[int] = ()
    streams: bool = False
    is_open: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The fields of the query that have an effect, none of them required: their schemas."""


def generates(
    path: str, summary: str, request: type[ClientModel], answer: type[Struct], *, streams: bool = True
) -> Operation:
    """An operation that gets a place in the queue and tokens from the engine."""
    return Operation("post", path, summary, answer, [request], (400, 404, 413, 429, 500, 503, 504), streams=streams)


def asks(path: str, summary: str, answer: type[Struct], *request: type[ClientModel]) -> Operation:
    """An operation that needs tokenizer and template alone."""
    return Operation("post", path, summary, answer, request, (400, 404, 413, 503))


def finds(
    method: Method,
    path: str,
    summary: str,
    answer: type[Struct],
    *,
    streams: bool = False,
    query: Mapping[str, Mapping[str, Any]] | None = None,
) -> Operation:
    """An operation on what is there already."""
    return Operation(method, path, summary, answer, errors=(400, 404, 503), streams=streams, query=query or {})


@dataclass(frozen=True, kw_only=True)
class GenerationRoute(Generic[R]):
    """A path that answers a body with generated text, by one of the writers. Ids of answers begin with `id_prefix`."""

    path: str
    summary: str
    request: type[R]
    answer: type[Struct]
    id_prefix: str
    stream_writer: Callable[[R, AnswerContext], StreamWriter]
    body_writer: Callable[[R, AnswerContext], BodyWriter]

    @property
    def operation(self) -> Operation:
        return generates(self.path, self.summary, self.request, self.answer)


@dataclass(frozen=True, kw_only=True)
class CountingRoute:
    """A path that answers a body with the number of tokens of its prompt."""

    path: str
    summary: str
    request: type[RequestFields]

    @property
    def operation(self) -> Operation:
        return asks(self.path, self.summary, InputTokens, self.request)


def _openai_error(error: ApiError, request_id: str | None) -> bytes:
    return error.body()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One wire format. Everything at `root` and below it speaks it, errors of unknown paths included.

    The app makes the handlers of `generation` and `counting`; those of `others` are in `app.routes`. `error_body` words
    an error, given the request's id, in the shape of `error_answer`; `request_id_header` is what the dialect's clients
    read that id from, beside ``x-request-id``. `retired` roots have no routes, and their errors are worded as
    those of `root`. At and below `shared_roots`, where OpenAI's clients ask as well, its own are known by the header
    `client_header`.
    """

    root: str
    retired: Sequence[str] = ()
    generation: Sequence[GenerationRoute[Any]] = ()
    counting: Sequence[CountingRoute] = ()
    others: Sequence[Operation] = ()
    error_body: Callable[[ApiError, str | None], bytes] = _openai_error
    error_answer: type[Struct] = ErrorEnvelope
    request_id_header: bytes | None = None
    shared_roots: Sequence[str] = ()
    client_header: str | None = None

    @property
    def operations(self) -> list[Operation]:
        """All that can be asked."""
        generation = [route.operation for route in self.generation]
        return [*generation, *(route.operation for route in self.counting), *self.others]
