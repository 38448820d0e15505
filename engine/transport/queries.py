"""Open questions to an engine: each waits for its answer, or for the engine's death."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio

from engine.commands import Answer, Answered, Ask, Command, EngineDied, Event, Question
from engine.errors import EngineDead, RequestFailed
from engine.messages import EngineReady
from engine.transport.channel import Deliver


class Queries:
    """Puts questions through `send` and takes their answers out of what the engine delivers."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, _Query] = {}
        self._is_engine_there = False

    async def ask(self, question: Question) -> Answer:
        """Raises EngineDead if there is no engine or it ends before it has answered, RequestFailed if it cannot answer.

        Leaves nothing behind when cancelled: an answer that nobody waits for any more is dropped.
        """
        if not self._is_engine_there:
            raise EngineDead("no engine is running")
        number = next(self._numbers)
        query = self._open[number] = _Query()
        try:
            self._send(Ask(number, question))
            await query.settled.wait()
        finally:
            del self._open[number]
        match query.event:
            case Answered(answer=answer) if answer is not None:
                return answer
            case Answered(error=error):
                raise RequestFailed(error)
            case EngineDied(error):
                raise EngineDead("the engine has ended before it could answer") from error
        raise AssertionError("settled by nothing")

    def before(self, deliver: Deliver) -> Deliver:
        """What the engine's events go through on their way to `deliver`."""

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
