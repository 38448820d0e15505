"""A dialect as one record: its paths, request models, writers and errors.

`protocol.registry` lists the records; the app makes handlers of them and `protocol.openapi` the description. A request
model's `translate` makes the server's own form of a request; see `protocol.translation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from protocol import answers
from protocol.body import ClientModel
from protocol.errors import ApiError
from protocol.request_fields import RequestFields

Method = Literal["get", "post", "delete"]
R = TypeVar("R", bound=RequestFields)


@dataclass(frozen=True)
class Operation:
    """One method of one path, as clients see it.

    A body is one of the models of `request`. `answer` is the shape of the answer's body or its content type, None for
    an empty body; statuses in `also` have the same body. `errors` omits 401, which operations have unless `is_open`.
    `query` are the schemas of the query's fields that have an effect; none of them is required.
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
    is_form: bool = False  # the body is multipart/form-data
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def generates(
    path: str, summary: str, request: type[ClientModel], answer: type[Struct], *, streams: bool = True
) -> Operation:
    """Return an operation that takes a queue slot and gets tokens from the engine."""
    return Operation("post", path, summary, answer, [request], (400, 404, 413, 429, 500, 503, 504), streams=streams)


def asks(path: str, summary: str, answer: type[Struct], *request: type[ClientModel]) -> Operation:
    """Return an operation that needs only tokenizer and template."""
    return Operation("post", path, summary, answer, request, (400, 404, 413, 503))


def finds(method: Method, path: str, summary: str, answer: type[Struct], **options: Any) -> Operation:
    """Return an operation on an object that must exist. `options` are fields of `Operation`."""
    return Operation(method, path, summary, answer, errors=(400, 404, 503), **options)


@dataclass(frozen=True, kw_only=True)
class GenerationRoute(Generic[R]):
    """A path that answers a body with generated text, by one of the writers. Ids of answers begin with `id_prefix`."""

    path: str
    summary: str
    request: type[R]
    answer: type[Struct]
    id_prefix: str
    stream_writer: Callable[[R, answers.AnswerContext], answers.StreamWriter]
    body_writer: Callable[[R, answers.AnswerContext], answers.BodyWriter]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One wire format. All paths at and below `root` speak it, errors of unknown paths included.

    The app makes the handlers of `generation`, and of `counting`: paths that answer a body of a model with the number
    of its prompt's tokens. The handlers of `others` are in `app.routes`. `error_body` writes an error, given the
    request's id, in the shape of `error_answer`, and `error_event` writes it as the only event of a stream, for
    dialects with streams that may begin with `keep_alive`. `request_id_header` is the dialect's header of that id, in
    addition to ``x-request-id``. `more_roots` are further roots; one without routes still has the dialect's errors. At
    and below `shared_roots`, which OpenAI's clients use too, a request with the header `client_header` is the
    dialect's.
    `stream_type` is the content type of its streams; `keep_alive` is a part of one without effect.
    """

    root: str
    more_roots: Sequence[str] = ()
    generation: Sequence[GenerationRoute[Any]] = ()
    counting: Mapping[str, type[RequestFields]] = field(default_factory=dict)
    others: Sequence[Operation] = ()
    error_body: Callable[[ApiError, str | None], bytes] = lambda error, request_id: error.body()
    error_answer: type[Struct] = answers.ErrorEnvelope
    error_event: Callable[[ApiError, str | None], bytes] | None = None
    request_id_header: bytes | None = None
    shared_roots: Sequence[str] = ()
    client_header: str | None = None
    stream_type: str = answers.CONTENT_TYPE
    keep_alive: bytes = answers.KEEP_ALIVE

    @property
    def operations(self) -> list[Operation]:
        generation = [generates(each.path, each.summary, each.request, each.answer) for each in self.generation]
        counting = [
            asks(path, "Count its tokens.", answers.InputTokens, model) for path, model in self.counting.items()
        ]
        return [*generation, *counting, *self.others]
