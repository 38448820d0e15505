"""The front end's hold on an engine process of this machine: itself, its sockets, its heartbeat and its lifeline.

Made and used by `engine.transport.process_client` on one event loop. It owns everything that has to be gone at the end;
whatever happens, leaving its block leaves neither a process nor a file.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import anyio
import zmq

from engine.commands import Command, Event
from engine.core.heartbeat import Heartbeat
from engine.errors import EngineDead
from engine.transport.wire import HEARTBEAT, Ends, NumberChecker, Numberer, decoder

_LONGEST_PATH = 100  # of a Unix socket's 107 characters
# What a process has said last may still be on its way when its end is known. With status 0 it has said that it ends,
# so that is waited for; otherwise there is only what it had said before.
LAST_EVENT_SECONDS = 2.0
CUT_OFF_SECONDS = 0.05
LOOKING_SECONDS = 0.1  # between two checks whether the process is stopped


class Ended(NamedTuple):
    """How an engine's process has ended."""

    error: EngineDead
    last_event_seconds: float  # for which its last event may still be on its way


class Child:
    """An engine process; a context manager that starts it and, at the end, kills it if it still runs.

    What `command` starts calls `engine.transport.process_core.serve_parent`, with the path of a private directory and
    the number of its end of the lifeline as its last arguments.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        ends_when_stopped: bool = False,
    ) -> None:
        """With `ends_when_stopped`, a process that is stopped (SIGSTOP) and cannot answer is killed."""
        self._command = command
        self._environment = environment
        self._ends_when_stopped = ends_when_stopped
        self._encode = Numberer().encode
        self._decode = decoder(Event).decode
        self._numbers = NumberChecker()
        self._peer: bytes | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(_private_directory()))
            self.heartbeat = Heartbeat.create(directory / HEARTBEAT)
            context = zmq.Context()
            stack.callback(context.destroy, linger=0)
            ends = Ends.within(directory)
            self._down = _bind(context, zmq.ROUTER, ends.down)
            self._up = _bind(context, zmq.PULL, ends.up)
            self._lifeline, theirs = socket.socketpair()
            stack.callback(self._lifeline.close)
            with theirs:
                arguments = [*self._command, str(directory), str(theirs.fileno())]
                self._process = _start(arguments, self._environment, theirs.fileno())
            stack.callback(self._end)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self, setup: Any) -> None:
        """Wait for the engine's first message, then send it its setup: plain data, before all commands.

        ROUTER would drop what is sent earlier, because it does not know its peer yet.
        """
        while self._peer is None:
            try:
                self._peer, *_ = self._down.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await anyio.wait_readable(_descriptor(self._down))
        self.send(setup)

    def send(self, command: Command | Any) -> None:
        """Send without waiting: the high-water mark is off. ZMQ drops what is sent to an engine that has ended."""
        if self._peer is not None:
            self._down.send_multipart([self._peer, self._encode(command)], zmq.NOBLOCK)

    async def receive(self) -> list[Event]:
        """Return all events that have arrived, in order, and wait for the first. Raises msgspec.DecodeError for a
        message that is no event."""
        while True:
            events: list[Event] = []
            # The descriptor of a ZMQ socket reports a change only once. So wait for it only after a receive has failed,
            # which has seen every change so far.
            with suppress(zmq.Again):
                while True:
                    events.append(self._decode(self._numbers.content_of(self._up.recv(zmq.NOBLOCK))))
            if events:
                return events
            await anyio.wait_readable(_descriptor(self._up))

    async def wait_gone(self) -> Ended:
        """Wait until the process has ended, and reap it."""
        is_over = False
        while not is_over:
            with anyio.move_on_after(LOOKING_SECONDS if self._ends_when_stopped else math.inf):
                await anyio.wait_readable(self._lifeline)  # nothing is ever sent on it, so this is its end
                is_over = True
            if not is_over and self._is_stopped():
                self.kill()
        while (status := self._process.poll()) is None:  # noqa: ASYNC110 - it is about to be a zombie
            await anyio.sleep(0.002)
        return Ended(EngineDead(_how_it_ended(status)), CUT_OFF_SECONDS if status else LAST_EVENT_SECONDS)

    def _is_stopped(self) -> bool:
        # The process state decides, not silence: a slow process on a busy machine is not a stopped one.
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def kill(self) -> None:
        self._process.kill()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Nobody else can enter it, so nobody else can talk to the engine."""
    too_long = len(tempfile.gettempdir()) > _LONGEST_PATH - len("/headrace-12345678/heartbeat")
    return tempfile.TemporaryDirectory(
        prefix="headrace-",
        dir="/tmp" if too_long else None,  # noqa: S108 - made for this process alone
        ignore_cleanup_errors=True,
    )


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def _descriptor(of: zmq.Socket[bytes]) -> int:
    descriptor = of.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


def _start(arguments: list[str], environment: Mapping[str, str] | None, lifeline: int) -> subprocess.Popen[bytes]:
    # Signals to the whole group are for the front end. The child will ignore them, but not before Python has started;
    # until then it inherits that they are blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        return subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, pass_fds=(lifeline,))  # noqa: S603
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"the engine's process has ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"the engine's process was killed by {name}"
