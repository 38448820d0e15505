"""The front end's hold on one engine process: the process itself, its sockets, its heartbeat and its lifeline.

Made and used by `engine.transport.process_client` on one event loop. It owns everything that has to be gone at the end;
whatever happens, leaving its block leaves neither a process nor a file.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import zmq

from engine.commands import Command, Event
from engine.core.heartbeat import Heartbeat
from engine.transport.wire import DOWN, HEARTBEAT, UP, decoder, encoder

_LONGEST_PATH = 100  # of a Unix socket's 107 characters


class Child:
    """An engine process; a context manager that starts it and, at the end, kills it if it still runs.

    The child gets the path of a private directory and the number of its end of the lifeline as its last arguments.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment
        self._encode = encoder().encode
        self._decode = decoder(Event).decode
        self._peer: bytes | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(_private_directory()))
            self.heartbeat = Heartbeat.create(directory / HEARTBEAT)
            context = zmq.Context()
            stack.callback(context.destroy, linger=0)
            self._down = _bind(context, zmq.ROUTER, directory / DOWN)
            self._up = _bind(context, zmq.PULL, directory / UP)
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
        """Wait for the child's first sign, and send it its setup: plain data, before all commands. What is sent earlier
        would be dropped: ROUTER does not know its peer yet."""
        while self._peer is None:
            try:
                self._peer, _ = self._down.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await anyio.wait_readable(_descriptor(self._down))
        self.send(setup)

    def send(self, command: Command | Any) -> None:
        """Never waits: the high-water mark is off. What is sent to a child that has gone is dropped."""
        if self._peer is not None:
            self._down.send_multipart([self._peer, self._encode(command)], zmq.NOBLOCK)

    async def receive(self) -> list[Event]:
        """Everything that has arrived, in order. Waits until there is something."""
        while True:
            events: list[Event] = []
            # The descriptor of a ZMQ socket tells that something has changed, and tells it once: it may be waited for
            # only after receiving has failed, which has looked at everything that was told so far.
            with suppress(zmq.Again):
                while True:
                    events.append(self._decode(self._up.recv(zmq.NOBLOCK)))
            if events:
                return events
            await anyio.wait_readable(_descriptor(self._up))

    async def wait_gone(self) -> int:
        """Wait until the process has ended, and reap it. Returns its status as `subprocess` has it."""
        await anyio.wait_readable(self._lifeline)  # nothing is ever sent on it, so this is its end
        while (status := self._process.poll()) is None:  # noqa: ASYNC110 - it is about to be a zombie
            await anyio.sleep(0.002)
        return status

    def kill(self) -> None:
        """At once, whatever it does. Nothing happens if it has ended."""
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


def _descriptor(of: zmq.Socket[bytes]) -> int:
    descriptor = of.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, path: Path) -> zmq.Socket[bytes]:
    bound = context.socket(kind)
    bound.set_hwm(0)
    bound.bind(f"ipc://{path}")
    return bound


def _start(arguments: list[str], environment: Mapping[str, str] | None, lifeline: int) -> subprocess.Popen[bytes]:
    # Signals to the whole group are for the front end. The child will ignore them, but not before Python has started;
    # until then it inherits that they are blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, pass_fds=(lifeline,))  # noqa: S603
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
