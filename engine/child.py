"""Child processes under limits of the kernel, from their parent's side; one that misses its deadline is killed."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.child_main import receive, send, to_text

START_SECONDS = 60.0
"""Until a process is there. A tenth of one, unless the machine has much else to do."""

_MAIN = "import sys; sys.path += sys.argv[2:]; from {} import main; main(float(sys.argv[1]))"
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH")  # templates may tell the date; nothing else reaches the process


class ChildPool:
    """Processes of one main: as many as callers at once, started when they are needed. Thread-safe."""

    def __init__(self, main: str, packages: Sequence[str], timeout: float) -> None:
        self._new = partial(ChildProcess, main, packages, timeout)
        self._lock = threading.Lock()
        self._processes: set[ChildProcess] = set()
        self._idle: list[ChildProcess] = []
        self.is_closed = False

    def take_idle(self) -> ChildProcess | None:
        """One that nobody uses; None if there is none."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def start(self) -> ChildProcess:
        """A new one. Raises `EOFError` when the pool is closed, `OSError` if there can be none."""
        # The lock is kept until the process is in the set: one that `close` does not find would outlive the server.
        with self._lock:
            if self.is_closed:
                raise EOFError
            process = self._new()
            self._processes.add(process)
            return process

    def give_back(self, process: ChildProcess) -> None:
        """It may be used again."""
        with self._lock:
            self._idle.append(process)

    def end(self, process: ChildProcess) -> None:
        """It is of no more use."""
        process.end()
        with self._lock:
            self._processes.discard(process)

    def close(self) -> None:
        """End every process, those in use too, and start no more."""
        self.is_closed = True  # before the lock, which is not fair: threads that start processes could keep it for good
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            self.end(process)


class ChildProcess:
    """One process, used by one thread at a time, except that any may kill it.

    `main` is the module whose `main(timeout)` it runs; `packages` are files of what that imports.
    """

    def __init__(self, main: str, packages: Sequence[str], timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        # Signals to the whole group are for the server. The child will ignore them, but not before Python has started;
        # until then it inherits that they are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own words
                [sys.executable, "-I", "-S", "-B", "-c", _MAIN.format(main), str(timeout), *_paths(packages)],
                stdin=theirs.fileno(),
                stdout=watched,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
            )
        except BaseException:
            self._socket.close()
            os.close(self._lifeline)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(watched)
        self._ended = threading.Lock()
        self._is_there = False

    def exchange(self, message: bytes, seconds: float, longest: float = math.inf) -> tuple[int, str]:
        """Send `message`, and return the answer's kind and text. Raises `TimeoutError`, `OSError`, `EOFError`,
        `UnicodeDecodeError`."""
        if not self._is_there:
            receive(self._socket, 0, time.monotonic() + START_SECONDS)
            self._is_there = True
        deadline = time.monotonic() + seconds
        send(self._socket, 0, message, deadline)
        kind, payload = receive(self._socket, longest, deadline)
        return kind, to_text(payload)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it, and leave nothing of it. May be called twice."""
        if self._ended.acquire(blocking=False):
            self._process.kill()
            self._process.wait()
            self._socket.close()
            os.close(self._lifeline)


def _paths(packages: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(str(Path(file).resolve().parents[1]) for file in (__file__, *packages)))
