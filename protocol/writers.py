"""What writes an answer: a writer for its event stream, or one for its one body. Every dialect has both.

Writers do no I/O and know no time. They raise `ApiError` for an output that failed: before the first byte the app
answers it as plain JSON, after it as an error frame.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.messages import FinishReason, RequestOutput
from protocol.answer_check import AnswerCheck
from protocol.errors import ApiError, deadline_exceeded
from protocol.message_parts import MessageFormat, MessageParser, TokenBytes


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
    check: AnswerCheck | None = None  # of what no grammar could enforce

    def told(self, index: int = 0) -> dict[str, Any]:
        """What a choice that has ended, or a whole answer, says of its check: nothing if there is none."""
        return {} if self.check is None else self.check.told(index)

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
