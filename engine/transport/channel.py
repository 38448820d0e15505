"""The inbox and outbox of an engine in a thread.

    inbox   event loop → engine   commands (`engine.commands`); put without waiting, drained between steps
    outbox  engine → event loop   events, one batch per step; the engine never waits for the loop

1. Both directions are synchronous puts on unbounded queues, so an abort works inside a cancelled scope without a shield
   and cannot be lost. Admission bounds the inbox. The outbox is bounded because the engine produces only for requests
   that are open in the front end, and the front end merges the deltas of slow readers.
2. The loop is woken at most once per step, and not at all while an earlier wake-up is pending.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ctypes import c_int32
from queue import Empty, SimpleQueue
from typing import Any

import anyio

from engine.commands import Command, EngineDied, Event
from engine.errors import EngineDead
from engine.fairness import threadsafe_call_soon

logger = logging.getLogger(__name__)

Deliver = Callable[[list[Event]], None]
"""Takes all events since the last call, in order, on the event loop."""


def or_dead(deliver: Deliver, end: Callable[[], None]) -> Deliver:
    """Wrap `deliver`: if it fails, call `end`, which must end the engine, and deliver EngineDied as the last event. If
    the loop only logged the failure and went on, the outputs in these events would be lost."""
    is_over = False

    def take(events: list[Event]) -> None:
        nonlocal is_over
        if is_over:
            return
        try:
            deliver(events)
        except Exception as error:
            is_over = True
            logger.critical("Events of the engine could not be delivered; stopping the engine", exc_info=True)
            end()
            died = EngineDead(f"events of the engine could not be delivered ({type(error).__name__})")
            died.__cause__ = error
            deliver([EngineDied(died)])

    return take


class Leaving:
    """The requests that commands in the inbox end. Returns True if all given ones are: called many times within a step.
    While `news` is 0, none is."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.news = c_int32()

    def __call__(self, request_ids: Sequence[str]) -> bool:
        return bool(self.ids) and bool(request_ids) and self.ids.issuperset(request_ids)


class EngineChannel:
    """A channel to an engine: its inbox, and in subclasses its outbox.

    One thread puts commands in; the engine's thread takes them out.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self.are_leaving = Leaving()

    def put(self, command: Command) -> None:
        """Hand a command to the engine. Never waits, never fails."""
        self.are_leaving.ids.update(command.ends)
        self._inbox.put(command)
        if command.ends:
            self.are_leaving.news.value = 1

    def receive(self, *, wait: bool) -> list[Command]:
        """Return all commands that have arrived. With `wait`, sleep until there is one."""
        commands = [self._inbox.get()] if wait else []
        self.are_leaving.news.value = 0  # before the inbox is drained: a later command sets it again
        try:
            while True:
                commands.append(self._inbox.get_nowait())
        except Empty:
            pass
        for command in commands:
            self.are_leaving.ids.difference_update(command.ends)
        return commands

    def send(self, event: Event) -> None:
        """Hand an event to the front end. Never waits."""
        raise NotImplementedError


class RequestChannel(EngineChannel):
    """A channel between this event loop and one other thread.

    Created on the event loop (asyncio or trio), on which `deliver` is called. A slow loop gets several steps at once.
    """

    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._outbox: deque[Event] = deque()
        self._deliver = deliver
        self._wake_up_pending = False
        self._call_soon = threadsafe_call_soon()

    def send(self, event: Event) -> None:
        """Hand an event to the event loop. Events for a loop that has ended are dropped."""
        self._outbox.append(event)
        if not self._wake_up_pending:
            self._wake_up_pending = True
            try:
                self._call_soon(self._drain_outbox)
            except RuntimeError:  # asyncio raises it, trio a subclass: the loop has ended
                self._outbox.clear()

    def _drain_outbox(self) -> None:
        # The flag is cleared first: an event that arrives from here on schedules its own wake-up.
        self._wake_up_pending = False
        events: list[Event] = []
        while self._outbox:
            events.append(self._outbox.popleft())
        if events:
            self._deliver(events)


async def wait_done(future: Future[Any]) -> None:
    """Wait until a future is done. Cancelling this does not cancel the future."""
    done = anyio.Event()
    call_soon = threadsafe_call_soon()

    def wake(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            call_soon(done.set)

    future.add_done_callback(wake)
    await done.wait()
