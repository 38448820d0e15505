"""Processes that the kernel bounds and that are killed at a deadline, seen from their parent (`bounded_child`)."""

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
from pathlib import Path

from protocol.bounded_child import receive, send, to_text

START_SECONDS = 60.0
"""Until a process is there. A tenth of one, unless the machine has much else to do."""

_MAIN = "import sys; sys.path += sys.argv[2:]; from {} import main; main(float(sys.argv[1]))"
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH")  # templates may tell the date; nothing else reaches the process


class ChildProcess:
    """One process, used by one thread at a time, except that any may kill it.

    `main` is the module whose `main(timeout)` it runs; `packages` are files of what that imports.
    """

    def __init__(self, main: str, packages: Sequence[str], timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        # Signals to the whole group are for the server. The child will ignore them, but not before Python has started;
        # until then it inherits that they are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
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
