"""The event loop's helpers: worker threads for long work, lag measurement, garbage collection.

1. A hop to another thread and back costs about a tenth of a millisecond, and some milliseconds under load. Work that
   takes longer on the loop would delay all other streams, so it runs on a thread.
2. Its duration is estimated from the length of the body or the number of tokens and log-probabilities.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
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
FIRST_READS: Final = 8  # of a route; a request makes a few, and one of them builds the validators
READING_THREADS: Final = 2
WRITING_THREADS: Final = 2

_PER_OUTPUT = 8  # the weight of an output in addition to its tokens
_FLOATS_PER_TOKEN = 8  # of an embedding

T = TypeVar("T")


class Workload:
    """The worker threads of one server's requests: some for reading, others for writing."""

    def __init__(self) -> None:
        self._reading = FairThreads(READING_THREADS)
        self._writing = FairThreads(WRITING_THREADS)
        self._num_read: Counter[object] = Counter()  # by route; what threads have read without an error

    async def read(self, request: RequestScope, function: Callable[[], T], num_bytes: int = 0) -> T:
        """Run `function`, which reads the request's body and `num_bytes` more, and return its result. If the caller is
        cancelled, `function` may run on. A route's first requests need threads: they build its validators."""
        route = request.asgi_scope.get("endpoint")
        if self._num_read[route] >= FIRST_READS and len(request.body) + num_bytes <= INLINE_BODY_BYTES:
            return function()
        result = await self._reading.run(function)
        self._num_read[route] += 1
        return result

    async def write(self, weight: int, function: Callable[[], T]) -> T:
        """Run `function`, which writes a part of an answer, and return its result. `weight` is in tokens and
        log-probabilities. `function` may change the request's state, because the caller always waits for its end."""
        if weight <= INLINE_ANSWER:
            return function()
        return await self._writing.run(function, abandon=False)


def weight_of(outputs: Iterable[RequestOutput]) -> int:
    """Return the weight of outputs: their tokens and log-probabilities."""
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
    """Return the weight of an answer that is made of all outputs so far."""
    return 0 if outputs is None else outputs.num_output_tokens * (1 + outputs.logprobs_per_token)


def _num_logprobs(positions: list[TokenLogprobs]) -> int:
    every = positions[-1].every
    return len(positions) * (1 + (len(positions[-1].top) if every is None else len(every) // 4))


# ----------------------------------------------------------------------------------------------------------- event loop
# Two measures of what delays the event loop. *Lag* is the delay of every task: a task that sleeps for a known time
# wakes up late, whatever the cause: a callback, the interpreter's lock, another process on the core. A *hold* is the
# part of one request: the processor time of the loop's thread in one step of the request's task, from its resumption
# until it waits again. Other processes make no hold longer, so a long hold is a fault of the handler, and tests fail
# for it.

SWITCH_SECONDS: Final = 0.0005  # how long a thread keeps the interpreter's lock if another wants it; Python: 0.005
LAG_PERIOD: Final = 0.05  # seconds between two measurements of the lag; a shorter period would load an idle machine
LONG_HOLD: Final = 0.05  # seconds; a longer one is logged


async def measure_lag(on_lag: Callable[[float], None]) -> None:
    """Call `on_lag` with the seconds by which the loop wakes a sleeping task late, until cancelled."""
    while True:
        due = time.perf_counter() + LAG_PERIOD
        await anyio.sleep(LAG_PERIOD)
        on_lag(max(0.0, time.perf_counter() - due))


@coroutine
def in_steps(work: Coroutine[Any, Any, None], on_step: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Run `work` and call `on_step` with the processor time of each of its steps, in seconds."""
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
        except BaseException as error:  # usually a cancellation
            resume, argument = work.throw, error


# -------------------------------------------------------------------------------------------------------------- garbage
# Objects that the garbage collector need not visit: modules, which live as long as the process, and live requests.
#
# The server's modules have hundreds of thousands of objects, with torch's some 400,000. During their import the
# collector would visit them many times, a sixth of the time to ready; and every full collection afterwards would stop
# all streams for 0.1 s and more. A request has some hundred objects, which live as long as its answer and leave few
# cycles.


@contextmanager
def frozen_imports(module: str) -> Iterator[None]:
    """Collect nothing while the block imports `module`, and exempt all objects at its end from later collections. Does
    nothing if `module` was imported before, because then most new objects would be garbage."""
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
    """Collect no garbage during the block, which must leave little of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
