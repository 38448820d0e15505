"""A few threads that work for coroutines, and no more than these, whoever has gone meanwhile.

`anyio.to_thread` on asyncio gives back the place of an abandoned call at once, although its thread works on: clients
that send long texts and hang up would start threads without end. Here an abandoned call keeps its thread until it is
done, and one that has not begun never does. The threads are daemons: a call that never ends must not keep the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

T = TypeVar("T")


class WorkerThreads:
    """`count` threads, started when first needed. First come, first served."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._started = False
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Cancelled: nobody waits for it any more."""
        if not self._started:
            self._started = True
            for _ in range(self._count):
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        call = _Call(function, current_token())
        self._calls.put(call)
        try:
            await call.done.wait()
        finally:
            call.is_wanted = False
        if call.error is not None:
            raise call.error
        return call.result

    def _work(self) -> None:
        while True:
            self._calls.get().make()


class _Call(Generic[T]):
    result: T

    def __init__(self, function: Callable[[], T], loop: EventLoopToken) -> None:
        self._function = function
        self._loop = loop
        self.done = anyio.Event()
        self.is_wanted = True
        self.error: BaseException | None = None

    def make(self) -> None:
        if not self.is_wanted:
            return
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        with suppress(RuntimeError):  # the event loop has ended
            from_thread.run_sync(self.done.set, token=self._loop)
