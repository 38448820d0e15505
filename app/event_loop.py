"""Who keeps the event loop from its other work, and for how long.

Two measures, because they answer two questions. *Lag* is what everybody on the loop feels: a task that sleeps for a
known time wakes up late by so much, whatever kept the loop: a callback, the interpreter's lock, another process on the
core. A *hold* is what one request did to it: the processor time of the loop's own thread in one step of the request's
task, from being resumed until it waits again. Others who want the core make no hold longer, so one that is too long is
a fault of the handler, and tests fail for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Final

import anyio

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
