"""An engine on another machine, as the front end holds it: by TCP with CURVE keys that are made for it alone.

Only who got the keys is let in; what strangers send is dropped by ZMQ before anybody looks at it. A connection that is
lost is an engine that is lost: both sides end what they have, and the engine is started anew. What is said meanwhile
could not be known to have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, Self

import anyio
import zmq

from engine.commands import Command
from engine.core.heartbeat import Heartbeat
from engine.curve import CurveServer
from engine.errors import EngineLost
from engine.transport.wire import Ended, Ends, Link, Ping, Pulse

PING_SECONDS = 0.25  # a lost connection is seen by the next ping
LAST_EVENT_SECONDS = 0.25  # what was said last and what tells the end come by two connections


class Launched(Protocol):
    """An engine's process somewhere."""

    async def wait_ended(self) -> str:
        """How it has ended, or why it was not started. Once it has connected, the connection may tell earlier."""
        ...

    def lost(self, how: str) -> EngineLost:
        """What those are told whose requests it had: it says where it was."""
        ...

    def kill(self) -> None:
        """At once. Nothing happens if it has ended."""
        ...


Launch = Callable[[Ends], Launched]
"""Starts a process that calls `engine.transport.remote_core.serve_remote` with these ends, which are secret, and does
not wait for it."""


class RemoteLink(Link):
    """A hold on an engine process that `launch` starts on a machine from which `host`, an address of this one, can be
    reached."""

    def __init__(self, launch: Launch, host: str) -> None:
        super().__init__()
        self._launch = launch
        self._host = host
        self._lost = anyio.Event()
        self._how = "the connection to the engine is lost"

    def __enter__(self) -> Self:
        self.heartbeat = Heartbeat()
        with ExitStack() as stack:
            server = stack.enter_context(CurveServer(self._host))
            (self._down, down), (self._up, up) = server.bind(zmq.ROUTER), server.bind(zmq.PULL)
            self._down.router_mandatory = True  # or what is sent to nobody would be dropped without a word
            self._launched = self._launch(Ends(down, up, server.new_keys()))
            stack.callback(self.kill)
            self._resources = stack.pop_all()
        return self

    def send(self, command: Command | Any) -> None:
        try:
            super().send(command)
        except zmq.ZMQError:
            self._lost.set()

    async def connect(self, setup: Any) -> None:
        await super().connect(setup)
        self._ping()  # it knows the time before anything is asked of it

    def take(self, pulse: Pulse) -> None:
        last_progress = time.monotonic() - pulse.seconds_since_progress
        self.heartbeat.show(last_progress, is_asleep=pulse.is_asleep, kv_sequence=pulse.kv_sequence)

    async def wait_gone(self) -> Ended:
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._wait_ended)
            while not self._lost.is_set():
                with anyio.move_on_after(PING_SECONDS):
                    await self._lost.wait()
                self._ping()
            task_group.cancel_scope.cancel()
        return Ended(self._launched.lost(self._how), LAST_EVENT_SECONDS)

    def kill(self) -> None:
        self._launched.kill()
        self._lost.set()

    async def _wait_ended(self) -> None:
        self._how = await self._launched.wait_ended()
        self._lost.set()

    def _ping(self) -> None:
        self.send(Ping(time.monotonic()))
