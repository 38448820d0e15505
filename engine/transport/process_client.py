"""The engine in a process of its own: HTTP, JSON and tokenization share no interpreter lock with the steps.

`ProcessClient` is the counterpart of `engine.transport.client.ThreadClient`. The other end is
`engine.transport.process_core`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
import zmq

from engine.commands import Answer, Close, Command, EngineDied, Event, LoadingProgress, Question
from engine.core.heartbeat import Heartbeat
from engine.errors import EngineDead
from engine.messages import EngineReady
from engine.transport.channel import Deliver, or_dead
from engine.transport.child import Child
from engine.transport.queries import Queries
from engine.transport.wire import Report

END_SECONDS = 2.5  # that a step in progress has to end when the engine is told to


class ProcessClient:
    """An engine in a process of its own. `make_link` makes a hold on a new one.

    `setup` is plain data for the process; it holds no secrets. `on_progress` hears on the event loop how far loading
    is. The process' death, by whatever cause, is known at once; the death of this one ends it.
    """

    def __init__(self, make_link: Callable[[], Child], setup: Any, *, on_progress: Report | None = None) -> None:
        self._make_link = make_link
        self._setup = setup
        self._on_progress = on_progress or (lambda phase, done, total: None)
        self._link: Child | None = None
        self._queries = Queries(self.send)
        self._heartbeat = Heartbeat()
        self._is_ready = False
        self._is_ending = False
        self._gone = anyio.Event()
        self._over: anyio.Event = anyio.Event()  # its last event has been delivered

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._link.pid if self._link else None

    @property
    def is_available(self) -> bool:
        return self._is_ready and not self._over.is_set()

    @property
    def last_progress(self) -> float:
        return self._heartbeat.last_progress

    @property
    def is_asleep(self) -> bool:
        return self._heartbeat.is_asleep

    @property
    def kv_sequence(self) -> int:
        """The number of the latest KV events that the engine has told."""
        return self._heartbeat.kv_sequence

    @asynccontextmanager
    async def running(self, deliver: Deliver) -> AsyncIterator[None]:
        self._is_ready = self._is_ending = False
        self._gone, self._over = anyio.Event(), anyio.Event()
        with ExitStack() as stack:
            try:
                link = stack.enter_context(self._make_link())
            except (OSError, zmq.ZMQError) as error:  # no descriptors, memory or room for it
                deliver([EngineDied(EngineDead(f"the engine's process cannot be started: {error}"))])
                yield
                return
            self._link, self._heartbeat = link, link.heartbeat
            try:
                async with anyio.create_task_group() as task_group:
                    told = or_dead(self._queries.before(deliver), lambda: self._break_off(link))
                    task_group.start_soon(self._attend, link, told)
                    try:
                        yield
                    finally:
                        await self._end(link)
            finally:
                self._link = None

    def send(self, command: Command) -> None:
        if self._link is not None:
            self._link.send(command)

    async def query(self, question: Question) -> dict[int, Answer]:
        return {0: await self._queries.ask(question)}

    def _break_off(self, link: Child) -> None:
        self._over.set()
        link.kill()

    async def _end(self, link: Child) -> None:
        """Tell the engine to end. A step may take its time, within limits; loading need not be waited for."""
        self._is_ending = True
        if self._is_ready:
            link.send(Close())
            with anyio.move_on_after(END_SECONDS, shield=True):
                await self._gone.wait()
        link.kill()

    async def _attend(self, link: Child, deliver: Deliver) -> None:
        """Be there for the process until it has ended, and no longer. Cancellation has to wait: `_end` sees to that."""
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as task_group:
                    task_group.start_soon(self._listen, link, deliver)
                    ended = await link.wait_gone()
                    with anyio.move_on_after(ended.last_event_seconds):
                        await self._over.wait()
                    task_group.cancel_scope.cancel()
                if not self._over.is_set():
                    self._over.set()
                    shut_down = EngineDead("the engine has been shut down")
                    deliver([EngineDied(shut_down if self._is_ending else ended.error)])
        finally:
            link.kill()
            self._gone.set()

    async def _listen(self, link: Child, deliver: Deliver) -> None:
        await link.connect(self._setup)
        while not self._over.is_set():
            events: list[Event] = []
            try:
                received = await link.receive()
            except (msgspec.MsgspecError, RecursionError) as error:  # it is not what it was; nothing of it is believed
                received = [EngineDied(EngineDead(f"the engine's process says what is no event: {error}"))]
                link.kill()
            for event in received:
                match event:
                    case LoadingProgress(phase, done, total):
                        self._on_progress(phase, done, total)
                        continue
                    case EngineReady():
                        self._is_ready = True
                    case EngineDied():
                        self._over.set()
                events.append(event)
            if events:
                deliver(events)
