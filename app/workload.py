"""What of a request is done on the event loop, and what on a thread: short things here, long ones there.

A hop to another thread and back costs about a tenth of a millisecond, and some milliseconds under load; whatever takes
longer than that would be felt by all other streams. How long something will take is told by a cheap measure: the length
of the body, the number of tokens and of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from app.scope import RequestScope
from engine.frontend.fair_threads import FairThreads
from engine.frontend.request_stream import RequestStream
from engine.messages import RequestOutput, TokenLogprobs

INLINE_BODY_BYTES: Final = 64 * 1024  # parsing and checking them takes about a millisecond
INLINE_ANSWER: Final = 2048  # tokens and log-probabilities; writing them takes about three milliseconds
READING_THREADS: Final = 2
WRITING_THREADS: Final = 2
CHECKING_THREADS: Final = 2

_PER_OUTPUT = 8  # what an output weighs beside its tokens
_FLOATS_PER_TOKEN = 8  # of an embedding

T = TypeVar("T")


class Workload:
    """The threads of one server's requests. Reading, writing and checking have their own, so none waits for another."""

    def __init__(self) -> None:
        self._reading = FairThreads(READING_THREADS)
        self._writing = FairThreads(WRITING_THREADS)
        self._checking = FairThreads(CHECKING_THREADS)

    async def read(self, request: RequestScope, function: Callable[[], T], num_bytes: int = 0) -> T:
        """What `function` makes of the request's body, and of `num_bytes` more. It may run on when nobody waits."""
        if len(request.body) + num_bytes <= INLINE_BODY_BYTES:
            return function()
        return await self._reading.run(function)

    async def write(self, weight: int, function: Callable[[], T]) -> T:
        """What `function` makes of so much of an answer. It may change what the request has, which waits for it."""
        if weight <= INLINE_ANSWER:
            return function()
        return await self._writing.run(function, abandon=False)

    async def check(self, function: Callable[[], T]) -> T:
        """What `function` makes of an answer that it waits for a check of."""
        return await self._checking.run(function, abandon=False)


def weight_of(outputs: Iterable[RequestOutput]) -> int:
    """How much there is to be written, in tokens and log-probabilities."""
    weight = 0
    for output in outputs:
        weight += _PER_OUTPUT + len(output.token_ids)
        if output.logprobs:
            weight += _num_logprobs(output.logprobs)
        if output.prompt_logprobs:
            weight += _num_logprobs(output.prompt_logprobs)
        if output.embedding is not None:
            weight += len(output.embedding) // (4 * _FLOATS_PER_TOKEN)
    return weight


def weight_so_far(outputs: RequestStream | None) -> int:
    """How much an answer holds that is made of all that has come."""
    return 0 if outputs is None else outputs.num_output_tokens * (1 + outputs.logprobs_per_token)


def _num_logprobs(positions: list[TokenLogprobs]) -> int:
    every = positions[-1].every
    return len(positions) * (1 + (len(positions[-1].top) if every is None else len(every) // 4))
