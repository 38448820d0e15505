"""`EngineClient` for an engine process, so that HTTP, JSON and tokenization share no interpreter lock with the steps.

`engine.transport.process_core` is the other end. Used on one event loop. At the end, in any case, no process and no
file is left behind.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import anyio
import msgspec
import zmq

from engine.child import Fork, ForkServer, end_in_words, start_process
from engine.commands import Answer, Close, Command, EngineDied, Event, LoadingProgress, Question
from engine.core.heartbeat import Heartbeat
from engine.errors import EngineDead
from engine.messages import EngineReady
from engine.transport.channel import Deliver, or_dead
from engine.transport.client import Queries
from engine.transport.wire import HEARTBEAT, NumberChecker, Numberer, Report, addresses, decoder

DESCRIPTORS = 16  # that a process takes here: sockets, pipes, the heartbeat
END_SECONDS = 2.5  # time for a step in progress to end after Close was sent

_LONGEST_PATH = 100  # characters; a Unix socket's path may have 107
# When a process has ended, its last event may still be on its way. With status 0 it has sent EngineDied, so the client
# waits for that; with another status only events sent earlier can arrive.
LAST_EVENT_SECONDS = 2.0
CUT_OFF_SECONDS = 0.05
STOPPED_CHECK_SECONDS = 0.1  # between two checks whether the process is stopped


class ProcessClient:
    """An engine in a process of its own. `make_process` makes a new one.

    `setup` is plain data for the process, without secrets. `on_progress` is called on the event loop while the model is
    loaded. The client notices any end of the process at once. The process ends when this process ends.
    """

    def __init__(
        self, make_process: Callable[[], EngineProcess], setup: Any, *, on_progress: Report | None = None
    ) -> None:
        self._make_process = make_process
        self._setup = setup
        self._on_progress = on_progress or (lambda phase, done, total: None)
        self._process: EngineProcess | None = None
        self._queries = Queries(self.send)
        self._heartbeat = Heartbeat()
        self._is_ready = False
        self._is_ending = False
        self._gone = anyio.Event()
        self._over: anyio.Event = anyio.Event()  # the last event has been delivered

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None if there is none."""
        return self._process.pid if self._process else None

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
        """The number of the latest KV events that the engine has sent."""
        return self._heartbeat.kv_sequence

    @asynccontextmanager
    async def running(self, deliver: Deliver) -> AsyncIterator[None]:
        self._is_ready = self._is_ending = False
        self._gone, self._over = anyio.Event(), anyio.Event()
        with ExitStack() as stack:
            try:
                process = stack.enter_context(self._make_process())
            except (OSError, zmq.ZMQError) as error:  # no file descriptors, memory or disk space left
                deliver([EngineDied(EngineDead(f"the engine's process cannot be started: {error}"))])
                yield
                return
            self._process, self._heartbeat = process, process.heartbeat
            try:
                async with anyio.create_task_group() as task_group:
                    guarded = or_dead(self._queries.before(deliver), lambda: self._break_off(process))
                    task_group.start_soon(self._attend, process, guarded)
                    try:
                        yield
                    finally:
                        await self._end(process)
            finally:
                self._process = None

    def send(self, command: Command) -> None:
        if self._process is not None:
            self._process.send(command)

    async def query(self, question: Question) -> dict[int, Answer]:
        return {0: await self._queries.ask(question)}

    def _break_off(self, process: EngineProcess) -> None:
        self._over.set()
        process.kill()

    async def _end(self, process: EngineProcess) -> None:
        """End the engine. A step in progress gets `END_SECONDS`; an engine that is loading is killed at once."""
        self._is_ending = True
        if self._is_ready:
            process.send(Close())
            with anyio.move_on_after(END_SECONDS, shield=True):
                await self._gone.wait()
        process.kill()

    async def _attend(self, process: EngineProcess, deliver: Deliver) -> None:
        """Deliver events until the process has ended. Shielded from cancellation: `_end` ends it."""
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as task_group:
                    task_group.start_soon(self._listen, process, deliver)
                    ended = await process.wait_gone()
                    with anyio.move_on_after(ended.last_event_seconds):
                        await self._over.wait()
                    task_group.cancel_scope.cancel()
                if not self._over.is_set():
                    self._over.set()
                    shut_down = EngineDead("the engine has been shut down")
                    deliver([EngineDied(shut_down if self._is_ending else ended.error)])
        finally:
            process.kill()
            self._gone.set()

    async def _listen(self, process: EngineProcess, deliver: Deliver) -> None:
        await process.connect(self._setup)
        while not self._over.is_set():
            events: list[Event] = []
            try:
                received = await process.receive()
            except (msgspec.MsgspecError, RecursionError) as error:  # events earlier in the same batch are dropped
                received = [EngineDied(EngineDead(f"the engine's process has sent an invalid event: {error}"))]
                process.kill()
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


class Ended(NamedTuple):
    """The end of an engine's process."""

    error: EngineDead
    last_event_seconds: float  # how long its last event may still be on its way


class EngineProcess:
    """An engine process with its sockets, heartbeat and lifeline. A context manager that starts and ends it.

    `command`, or that of a `ForkServer`, must call `engine.transport.process_core.serve_parent`. Two arguments are
    appended: the path of a private directory, and the descriptor of the child's end of the lifeline.
    """

    def __init__(
        self,
        command: Sequence[str] | ForkServer,
        environment: Mapping[str, str] | None = None,
        *,
        ends_when_stopped: bool = False,
    ) -> None:
        """Prepare a process. With `ends_when_stopped`, it is killed if it is stopped (SIGSTOP): it cannot answer."""
        self._command = command
        self._environment = environment
        self._ends_when_stopped = ends_when_stopped
        self._encode = Numberer().encode
        self._decode = decoder(Event).decode
        self._numbers = NumberChecker()
        self._peer: bytes | None = None

    def __enter__(self) -> Self:
        """Start the process, unless it was started before."""
        if hasattr(self, "_resources"):
            return self
        with ExitStack() as stack:
            with ExitStack() as reserve:  # raises OSError for too few; without them ZMQ aborts this process
                for _ in range(DESCRIPTORS):
                    reserve.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            directory = Path(stack.enter_context(_private_directory()))
            self.heartbeat = Heartbeat.create(directory / HEARTBEAT)
            context = zmq.Context()
            stack.callback(context.destroy, linger=0)
            down, up = addresses(directory)
            self._down = _bind(context, zmq.ROUTER, down)
            self._up = _bind(context, zmq.PULL, up)
            self._lifeline, theirs = socket.socketpair()
            stack.callback(self._lifeline.close)
            with theirs:
                own = [str(directory), str(theirs.fileno())]
                self._process: subprocess.Popen[bytes] | Fork
                if isinstance(self._command, ForkServer):
                    self._process = self._command.fork(own[0], theirs.fileno())
                else:
                    descriptors = (theirs.fileno(),)
                    self._process = start_process([*self._command, *own], self._environment, pass_fds=descriptors)
            stack.callback(self._end)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self, setup: Any) -> None:
        """Wait for the engine's first message, then send its setup, unless `begin` has."""
        while not self.begin(setup):
            await anyio.wait_readable(_descriptor(self._down))

    def begin(self, setup: Any, seconds: float = 0.0) -> bool:
        """Send the engine its setup: plain data, before all commands. Return False if its first message does not arrive
        within `seconds`: a ROUTER socket drops everything sent before that."""
        if self._peer is None:
            if not self._down.poll(int(1000 * seconds)):
                return False
            self._peer, *_ = self._down.recv_multipart(zmq.NOBLOCK)
            self.send(setup)
        return True

    def send(self, message: Any) -> None:
        """Send without waiting: there is no high-water mark. ZMQ drops messages to an engine that has ended."""
        if self._peer is not None:
            self._down.send_multipart([self._peer, self._encode(message)], zmq.NOBLOCK)

    async def receive(self) -> list[Event]:
        """Wait for an event, and return all that have arrived, in order. Raises msgspec.DecodeError for a message that
        is no event."""
        while True:
            events: list[Event] = []
            # The descriptor of a ZMQ socket reports a change only once. So wait for it only after a receive has failed:
            # by then every earlier change has been seen.
            with suppress(zmq.Again):
                while True:
                    events.append(self._decode(self._numbers.content_of(self._up.recv(zmq.NOBLOCK))))
            if events:
                return events
            await anyio.wait_readable(_descriptor(self._up))

    async def wait_gone(self) -> Ended:
        is_over = False
        while not is_over:
            with anyio.move_on_after(STOPPED_CHECK_SECONDS if self._ends_when_stopped else math.inf):
                await anyio.wait_readable(self._lifeline)  # nothing is ever sent on it: readable means closed
                is_over = True
            if not is_over and self._is_stopped():
                self.kill()
        while (status := self._process.poll()) is None:  # noqa: ASYNC110 - it is about to be a zombie
            await anyio.sleep(0.002)
        error = EngineDead(f"the engine's process {end_in_words(status)}")
        return Ended(error, CUT_OFF_SECONDS if status else LAST_EVENT_SECONDS)

    def _is_stopped(self) -> bool:
        # The kernel's process state decides, not silence: a slow process on a busy machine is not stopped.
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
    """Make a directory that other users cannot enter, so that they cannot talk to the engine."""
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
