"""The front end's interface to an engine, `EngineClient`, and the engine in a thread of this process.

`ThreadClient` runs an engine in one worker thread: it loads the model and makes every step. For an engine in a process
there is `engine.transport.process_client`. Both run `run_loop`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
from anyio import to_thread

from engine.commands import Answer, Answered, Ask, Break, Close, Command, EngineDied, Event, Question
from engine.core.core import EngineCore
from engine.errors import EngineDead, RequestFailed
from engine.executor import Watched
from engine.messages import EngineReady
from engine.transport.channel import Deliver, EngineChannel, RequestChannel, or_dead


class EngineClient(Protocol):
    """The front end's interface to an engine. `send` never blocks; events arrive by `deliver`, on the event loop.

    `deliver` gets one EngineReady, then one EngineCoreOutputs per step, and at last one EngineDied.
    """

    def running(self, deliver: Deliver) -> AbstractAsyncContextManager[None]:
        """Start the engine; on leaving the block, end it and wait for its end."""

    def send(self, command: Command) -> None:
        """Send a command; the engine carries out commands in order. Never waits, so it works in a cancelled scope. Does
        nothing without an engine."""

    async def query(self, question: Question) -> dict[int, Answer]:
        """Return the answer of each live engine, by its number. Engines answer between two steps, after the commands
        that were sent before. Raises EngineDead if every engine ends before it has answered, and RequestFailed if an
        engine cannot answer."""

    @property
    def is_available(self) -> bool:
        """True if there is an engine that would run a request now."""

    @property
    def last_progress(self) -> float:
        """The time of `time.monotonic()` when the engine's latest step ended or it woke up; 0 before that."""

    @property
    def is_asleep(self) -> bool:
        """True if the engine has nothing to do, or does not run yet."""


class ThreadClient:
    """An engine in a worker thread. `make_core` loads the model; it is called on that thread."""

    def __init__(self, make_core: Callable[[], EngineCore]) -> None:
        self._make_core = make_core
        self._core: EngineCore | None = None
        self._channel: RequestChannel | None = None
        self._queries = Queries(self.send)

    @property
    def is_available(self) -> bool:
        return self._core is not None

    @property
    def last_progress(self) -> float:
        return self._core.heartbeat.last_progress if self._core else 0.0

    @property
    def is_asleep(self) -> bool:
        return self._core is None or self._core.heartbeat.is_asleep

    @asynccontextmanager
    async def running(self, deliver: Deliver) -> AsyncIterator[None]:
        self._channel = RequestChannel(or_dead(self._queries.before(deliver), lambda: self.send(Close())))
        async with anyio.create_task_group() as task_group:
            # With a limiter of its own the engine neither takes a thread from tokenization nor waits for one.
            run = partial(to_thread.run_sync, limiter=anyio.CapacityLimiter(1))
            task_group.start_soon(run, run_loop, self._make, self._channel)
            try:
                yield
            finally:
                # Even a cancelled scope waits for its worker thread; Close ends the thread.
                self._channel.put(Close())

    def send(self, command: Command) -> None:
        if self._channel is not None:
            self._channel.put(command)

    async def query(self, question: Question) -> dict[int, Answer]:
        return {0: await self._queries.ask(question)}

    def _make(self) -> EngineCore:
        self._core = self._make_core()
        return self._core


class Queries:
    """Open questions to an engine. A question is open until its answer arrives or the engine ends.

    Sends questions with `send`, and takes their answers out of the events that the engine delivers.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, _Query] = {}
        self._is_engine_there = False

    async def ask(self, question: Question) -> Answer:
        """Return the engine's answer. Raises EngineDead if no engine runs or it ends before it has answered,
        RequestFailed if it cannot answer. The answer to a cancelled question is dropped."""
        if not self._is_engine_there:
            raise EngineDead("no engine is running")
        number = next(self._numbers)
        query = self._open[number] = _Query()
        try:
            self._send(Ask(number, question))
            await query.settled.wait()
        finally:
            del self._open[number]
        event = query.event
        if isinstance(event, EngineDied):
            raise EngineDead("the engine has ended before it could answer") from event.error
        assert event is not None
        if event.answer is None:
            raise RequestFailed(event.error)
        return event.answer

    def before(self, deliver: Deliver) -> Deliver:
        """Return a receiver of the engine's events that takes out the answers and passes the rest to `deliver`."""

        def take(events: list[Event]) -> None:
            others: list[Event] = []
            for event in events:
                if isinstance(event, Answered):
                    if event.number in self._open:
                        self._open[event.number].settle(event)
                    continue
                if isinstance(event, EngineReady):
                    self._is_engine_there = True
                elif isinstance(event, EngineDied):
                    self._is_engine_there = False
                    for query in self._open.values():
                        query.settle(event)
                others.append(event)
            if others:
                deliver(others)

        return take


class _Query:
    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.event: Answered | EngineDied | None = None

    def settle(self, event: Answered | EngineDied) -> None:
        self.event = self.event or event
        self.settled.set()


def run_loop(make_core: Callable[[], EngineCore], channel: EngineChannel) -> None:
    """Run an engine on the calling thread: load it, send EngineReady, run until Close, and send EngineDied.

    Never raises: an error is the engine's last event.
    """
    try:
        core = make_core()
        try:
            channel.send(
                EngineReady(
                    vocab_size=core.executor.vocab_size,
                    num_blocks=core.executor.num_blocks,
                    block_size=core.executor.block_size,
                    max_model_len=core.config.max_model_len,
                    facts=core.config.facts,
                    step_costs=core.costs.to_json() if core.costs.is_known else b"",
                    pipeline_depth=core.config.pipeline_depth,
                )
            )
            if isinstance(core.executor, Watched):
                core.executor.watch(lambda error: channel.put(Break(error)))
            run_until_closed(core, channel)
        finally:
            core.shutdown()
    except BaseException as error:  # also a panic of a native library, which is no Exception, and SystemExit
        channel.send(EngineDied(error))
    else:
        channel.send(EngineDied(EngineDead("the engine has been shut down")))


def run_until_closed(core: EngineCore, channel: EngineChannel) -> None:
    """Repeat: carry out the commands that have arrived, make a step, send its events. Sleep when there is no work."""
    while not core.is_closed:
        idle = not (core.has_work or core.prepare() or core.has_news)
        if idle:
            core.heartbeat.sleep()
        commands = channel.receive(wait=idle)
        if idle:
            core.heartbeat.wake()
        for command in commands:
            event = core.carry_out(command)
            if event is not None:
                channel.send(event)
        if core.has_work and not core.is_closed:
            channel.send(core.step(channel.are_leaving))
        elif core.has_news:
            channel.send(core.report())
