"""From the sign to stop to the end: drain first, and end at once when asked a second time.

The sign is a signal to this process, or what Hypercorn waits for: with `hypercorn app:main` the application runs in
a child process, and the parent tells it through an event of its own. Whoever signals the whole group (systemd, a
terminal) brings about both, in either order and milliseconds apart: that is one sign, not two.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable

import anyio

logger = logging.getLogger(__name__)

ONE_SIGN_SECONDS = 1.0  # that the first signal may come after the parent's word and still mean the same


class Shutdown:
    """The end of one application. `drain` is called once and returns when no request is left."""

    def __init__(self, drain: Callable[[], Awaitable[None]], *, has_parent: bool | None = None) -> None:
        """`has_parent`: whether a process of Hypercorn's gives the word, too; by default, whether there is one."""
        self._drain = drain
        self._has_parent = multiprocessing.parent_process() is not None if has_parent is None else has_parent
        self._asked = anyio.Event()
        self._asked_since: float | None = None
        self._signalled = False
        self._drained = anyio.Event()
        self._draining = False

    async def wait_asked(self) -> None:
        """Until the end is asked for."""
        await self._asked.wait()

    async def listen_for_signals(self) -> None:
        """Take SIGTERM and SIGINT from now on: the first asks for the end, the second does not wait for it."""
        if threading.current_thread() is not threading.main_thread():
            return  # `headrace chat` serves from another thread and ends its server by itself
        with anyio.open_signal_receiver(*_unignored(signal.SIGTERM, signal.SIGINT)) as signals:
            async for number in signals:
                if self._is_second():
                    logger.warning("%s again: not waiting for the drain", signal.Signals(number).name)
                    logging.shutdown()
                    os._exit(128 + number)
                self._signalled = True
                self._ask()

    async def wait_and_drain(self, trigger: Callable[[], Awaitable[None]]) -> None:
        """Wait for `trigger` or a signal, then drain. For `hypercorn_patches.drain_before_shutdown`."""
        async with anyio.create_task_group() as task_group:

            async def wait_for(sign: Callable[[], Awaitable[None]]) -> None:
                await sign()
                task_group.cancel_scope.cancel()

            task_group.start_soon(wait_for, trigger)
            task_group.start_soon(wait_for, self._asked.wait)
        self._ask()
        if not self._draining:
            self._draining = True
            await self._drain()
            self._drained.set()
        await self._drained.wait()

    def _ask(self) -> None:
        self._asked_since = self._asked_since or time.monotonic()
        self._asked.set()

    def _is_second(self) -> bool:
        """Of a signal that has just come, whether the end had been asked for before."""
        if self._signalled or self._asked_since is None:
            return self._signalled
        # Without a parent only a signal can have asked for the end, although `app.runner`'s trigger may have taken it.
        return not self._has_parent or time.monotonic() - self._asked_since >= ONE_SIGN_SECONDS


def _unignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """A worker of Hypercorn ignores SIGINT, because its parent answers Ctrl-C for both."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
