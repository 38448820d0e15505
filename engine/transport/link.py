"""The front end's two sockets to one engine, to which the engine connects.

`engine.transport.child` and `engine.transport.remote` say where they are and who is at the other end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

import anyio
import zmq

from engine.commands import Command, Event
from engine.core.heartbeat import Heartbeat
from engine.errors import EngineDead
from engine.transport.wire import NumberChecker, Numberer, Pulse, decoder


class Ended(NamedTuple):
    """How an engine's process has ended."""

    error: EngineDead
    last_event_seconds: float  # that what it has said last may still be on its way


class Link(ABC):
    """A hold on an engine elsewhere, which leaving its block kills. Those that inherit from it make the sockets, start
    the engine and see its end."""

    heartbeat: Heartbeat
    _down: zmq.Socket[bytes]  # ROUTER
    _up: zmq.Socket[bytes]  # PULL
    _resources: ExitStack

    def __init__(self) -> None:
        self._encode = Numberer().encode
        self._decode = decoder(Event | Pulse).decode
        self._numbers = NumberChecker()
        self._peer: bytes | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if it is one of this machine."""
        return None

    async def connect(self, setup: Any) -> None:
        """Wait for the engine's first sign, and send it its setup: plain data, before all commands. What is sent
        earlier would be dropped: ROUTER does not know its peer yet."""
        while self._peer is None:
            try:
                self._peer, *_ = self._down.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await anyio.wait_readable(_descriptor(self._down))
        self.send(setup)

    def send(self, command: Command | Any) -> None:
        """Never waits: the high-water mark is off. What is sent to an engine that has gone is dropped."""
        if self._peer is not None:
            self._down.send_multipart([self._peer, self._encode(command)], zmq.NOBLOCK)

    async def receive(self) -> list[Event]:
        """Everything that has arrived, in order. Waits until there is something. Raises msgspec.DecodeError for what is
        no event."""
        while True:
            events: list[Event] = []
            # The descriptor of a ZMQ socket tells that something has changed, and tells it once: it may be waited for
            # only after receiving has failed, which has looked at everything that was told so far.
            with suppress(zmq.Again):
                while True:
                    event = self._decode(self._numbers.content_of(self._up.recv(zmq.NOBLOCK)))
                    if isinstance(event, Pulse):
                        self.take(event)
                    else:
                        events.append(event)
            if events:
                return events
            await anyio.wait_readable(_descriptor(self._up))

    def take(self, pulse: Pulse) -> None:  # noqa: B027 - nothing to do where memory is shared
        """The heartbeat of an engine that cannot share memory."""

    @abstractmethod
    async def wait_gone(self) -> Ended:
        """Wait until the engine has ended, or can be reached no more."""

    @abstractmethod
    def kill(self) -> None:
        """At once, whatever it does. Nothing happens if it has ended."""


def _descriptor(of: zmq.Socket[bytes]) -> int:
    descriptor = of.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
