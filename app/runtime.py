"""The event loop's helpers: worker threads for long work, lag measurement, garbage collection.

A hop to another thread and back costs about a tenth of a millisecond, and some milliseconds under load; whatever takes
longer than that would be felt by all other streams. How long something will take is told by a cheap measure: the length
of the body, the number of tokens and of log-probabilities.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any, Final, TypeVar

import anyio

from app.http.scope import RequestScope
from engine.fairness import FairThreads
from engine.frontend.request_stream import RequestStream
from engine.messages import RequestOutput, TokenLogprobs

INLINE_BODY_BYTES: Final = 64 * 1024  # parsing and checking them takes about a millisecond
INLINE_ANSWER: Final = 2048  # tokens and log-probabilities; writing them takes about three milliseconds
READING_THREADS: Final = 2
WRITING_THREADS: Final = 2

_PER_OUTPUT = 8  # what an output weighs beside its tokens
_FLOATS_PER_TOKEN = 8  # of an embedding

T = TypeVar("T")


class Workload:
    """The threads of one server's requests. Reading does not wait for writing, nor writing for reading."""

    def __init__(self) -> None:
        self._reading = FairThreads(READING_THREADS)
        self._writing = FairThreads(WRITING_THREADS)

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


# ----------------------------------------------------------------------------------------------------------- event loop
# Who keeps the event loop from its other work, and for how long.
#
# Two measures, because they answer two questions. *Lag* is what everybody on the loop feels: a task that sleeps for a
# known time wakes up late by so much, whatever kept the loop: a callback, the interpreter's lock, another process on
# the core. A *hold* is what one request did to it: the processor time of the loop's own thread in one step of the
# request's task, from being resumed until it waits again. Others who want the core make no hold longer, so one that is
# too long is a fault of the handler, and tests fail for it.


logger = logging.getLogger(__name__)

LAG_PERIOD: Final = 0.05  # seconds between two looks at the lag; oftener would be felt by an idle machine
LONG_HOLD: Final = 0.05  # seconds; a longer one is logged


async def measure_lag(on_lag: Callable[[float], None]) -> None:
    """Tell `on_lag`, for ever, how late the loop wakes a task."""
    while True:
        due = time.perf_counter() + LAG_PERIOD
        await anyio.sleep(LAG_PERIOD)
        on_lag(max(0.0, time.perf_counter() - due))


@coroutine
def in_steps(work: Coroutine[Any, Any, None], on_step: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Run `work` and tell `on_step` the processor time of each of its steps, in seconds."""
    resume: Callable[[Any], Any] = work.send
    argument: Any = None
    while True:
        started = time.thread_time()
        try:
            waits_for = resume(argument)
        except StopIteration:
            return
        finally:
            on_step(time.thread_time() - started)
        try:
            resume, argument = work.send, (yield waits_for)
        except BaseException as error:  # a cancellation above all
            resume, argument = work.throw, error


def warn_of_hold(seconds: float, by: str, request_id: str | None = None) -> None:
    """Log a hold that others have felt."""
    logger.warning("%s held the event loop for %.3f s (request %s)", by, seconds, request_id or "-")


# -------------------------------------------------------------------------------------------------------------- garbage
# What the garbage collector need not look at: modules that stay as long as the process, and requests that are alive.
#
# The server's modules consist of hundreds of thousands of objects, with torch's some 400,000. While they are imported
# the collector goes over them again and again for nothing, a sixth of the time to ready; and every full collection
# afterwards would take 0.1 s and more to find them alive, in which no token moves.
#
# Requests consist of some hundred objects each that live as long as their answers, and leave few cycles behind.


NEW_OBJECTS: Final = 50_000  # more than were let go of, until the youngest are looked at; Python's own number is 700


@contextmanager
def frozen_imports(module: str) -> Iterator[None]:
    """For a block that imports `module` and all it needs: nothing is collected meanwhile, and what is there at its end
    is never looked at again. Does nothing if `module` was imported before, because then most of it would be garbage."""
    if module in sys.modules:
        yield
        return
    with no_collection():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """For a block that leaves little garbage, or keeps all that it makes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_seldom() -> None:
    """From now on requests come and go. With 256 streams open the collector took a tenth of the event loop's time
    otherwise, and 0.1 s at a stretch for each full collection."""
    gc.set_threshold(NEW_OBJECTS)
