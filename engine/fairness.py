"""A few threads that tenants take turns at, whatever each of them has to do there.

A limiter of the usual kind serves by arrival: whoever comes behind a tenant's hundred long prompts waits for all of
them. And asyncio's counts callers, not threads: what a client has left behind runs on, unseen, beside the next ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar

import anyio
from anyio import to_thread

from engine.transport.channel import threadsafe_call_soon

T = TypeVar("T")

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""Whose request is being answered, by name. The server sets it for each request."""


class FairThreads:
    """Runs functions on at most `size` threads at a time. Belongs to an event loop."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lines: dict[str, deque[anyio.Event]] = {}  # by tenant, the next one's first
        self._unlimited = anyio.CapacityLimiter(math.inf)

    async def run(self, function: Callable[[], T], *, abandon: bool = True) -> T:
        """What `function` returns. If the caller is cancelled meanwhile, it runs on to its end, keeps its thread until
        then, and nobody waits for it; if it has not begun, it never does.

        Without `abandon` the caller waits for its end: for a function that changes what others use afterwards.
        """
        await self._take_turn(current_tenant.get())
        # Who takes it, the thread or a caller that is cancelled before, gives the turn back.
        first_comes = iter((True,))
        call_soon = threadsafe_call_soon()

        def work() -> T | None:
            if not next(first_comes, False):
                return None
            try:
                return function()
            finally:
                with suppress(RuntimeError):  # the event loop has ended
                    call_soon(self._give_back)

        try:
            result = await to_thread.run_sync(work, abandon_on_cancel=abandon, limiter=self._unlimited)
        finally:
            if next(first_comes, False):
                self._give_back()
        return result  # type: ignore[return-value]  # None comes only where nobody waits

    async def _take_turn(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        line = self._lines.setdefault(tenant, deque())
        line.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._give_back()
            else:
                line.remove(turn)
                if not line:
                    del self._lines[tenant]
            raise

    def _give_back(self) -> None:
        if not self._lines:
            self._free += 1
            return
        tenant = next(iter(self._lines))
        line = self._lines.pop(tenant)
        line.popleft().set()
        if line:
            self._lines[tenant] = line  # behind all others
