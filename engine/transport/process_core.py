"""The main function of an engine's process.

    input thread    DEALER → msgpack → inbox  commands
    main thread     `engine.transport.client.run_loop`      loads the model and makes every step
    output thread   queue → msgpack → PUSH    events, one batch per step; the engine never waits for it

Only the parent ends this process, which ignores SIGINT, SIGTERM and SIGHUP: they reach a whole process group at once.
It also ends when the parent's end of the lifeline is closed, however the parent ended, even if this process is stopped.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import zmq

from engine.child import send_at_parents_end
from engine.child_main import FORKS, ignore_signals, serve_forks
from engine.commands import Command, Event, LoadingProgress, RequestsBegun
from engine.core.core import EngineCore
from engine.core.heartbeat import Heartbeat
from engine.transport.channel import EngineChannel
from engine.transport.client import run_loop
from engine.transport.wire import HEARTBEAT, NumberChecker, Numberer, Report, addresses, decoder

logger = logging.getLogger(__name__)

LINGER_MILLISECONDS = 2000  # how long to wait for the parent to take what was sent

Build = Callable[[Any, Report], EngineCore]


def serve_parent(build: Build) -> NoReturn:
    """Run the parent's engine, then exit. Exit status 0 means that the last event was sent.

    `build` makes the core on the main thread from the setup that `ProcessClient` sends, and reports its progress.
    """
    if FORKS in sys.argv:
        sys.argv[1:] = serve_forks(int(sys.argv[-1]))
    ignore_signals()
    # The kernel resumes this process when its parent ends: a stopped process would not notice that the lifeline closed.
    send_at_parents_end(signal.SIGCONT)
    *_, directory, descriptor = sys.argv
    private = Path(directory)
    threading.Thread(target=_end_with_parent, args=(int(descriptor), private), name="lifeline", daemon=True).start()
    channel = ProcessChannel(*addresses(private))
    setup = channel.connect()

    def make_core() -> EngineCore:
        core = build(setup, channel.report)
        core.heartbeat = Heartbeat.open(private / HEARTBEAT)
        core.heartbeat.wake()
        core.on_begin = lambda request_ids: channel.send(RequestsBegun(request_ids))
        gc.collect()
        gc.freeze()  # loaded objects live as long as the process: garbage collections need not visit them again
        return core

    run_loop(make_core, channel)
    channel.close()
    logging.shutdown()
    # All events have been sent, so no library's thread or exit handler may delay the end.
    os._exit(0)


class ProcessChannel(EngineChannel):
    """The channel to the front end, which has bound the two sockets."""

    def __init__(self, down: str, up: str) -> None:
        super().__init__()
        self._down_address, self._up_address = down, up
        self._outbox: SimpleQueue[Event | None] = SimpleQueue()
        self._numbers = NumberChecker()
        # Two contexts: closing the output's context waits until everything has been sent; the input's need not wait.
        self._down = zmq.Context().socket(zmq.DEALER)
        self._output = threading.Thread(target=vital, args=(self._talk,), name="engine-output", daemon=True)

    def connect(self) -> Any:
        """Send the first message, return the parent's answer, which is the setup, and start the two threads."""
        self._connect(self._down, self._down_address)
        self._down.send(b"")
        setup = decoder(Any).decode(self._receive())
        threading.Thread(target=vital, args=(self._listen,), name="engine-input", daemon=True).start()
        self._output.start()
        return setup

    def send(self, event: Event) -> None:
        self._outbox.put(event)

    def report(self, phase: str, done: int, total: int | None) -> None:
        self.send(LoadingProgress(phase, done, total))

    def close(self) -> None:
        """Wait, for a limited time, until the parent has received everything."""
        self._outbox.put(None)
        self._output.join()

    def _connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.set_hwm(0)
        socket.connect(address)

    def _listen(self) -> None:
        decode = decoder(Command).decode
        while True:
            self.put(decode(self._receive()))

    def _receive(self) -> memoryview:
        return self._numbers.content_of(self._down.recv())

    def _talk(self) -> None:
        context = zmq.Context()
        up = context.socket(zmq.PUSH)
        self._connect(up, self._up_address)
        encode = Numberer().encode
        while (event := self._outbox.get()) is not None:
            up.send(encode(event))  # it copies the buffer
        up.close(LINGER_MILLISECONDS)
        context.term()


def vital(work: Callable[[], None]) -> None:
    """Run the work of a thread that the engine needs. If it fails, end the process."""
    try:
        work()
    except BaseException:
        logger.critical("The engine's process ends because its input or output thread failed", exc_info=True)
        logging.shutdown()
        os._exit(1)


def _end_with_parent(descriptor: int, directory: Path) -> NoReturn:
    os.set_inheritable(descriptor, False)  # a process started from here must not keep it open
    with socket.socket(fileno=descriptor) as lifeline:
        lifeline.recv(1)  # nothing is ever sent: this returns when the parent has ended
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
