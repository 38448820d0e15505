"""The parent's side of child processes: bounded children, killed at a deadline, and the start of any other child."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.child_main import FORKS, GROUP_SIGNALS, receive, send, to_text

START_SECONDS = 60.0
"""Seconds within which a process must have started; on an idle machine it takes 0.1 s."""

_MAIN = "import sys; sys.path += sys.argv[2:]; from {} import main; main(float(sys.argv[1]))"
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH")  # templates may show the date; no other variable reaches the process


class ChildPool:
    """Bounded children that all run one module: one for each concurrent caller, started on demand. Thread-safe."""

    def __init__(self, main: str, packages: Sequence[str], timeout: float) -> None:
        self._new = partial(ChildProcess, main, packages, timeout)
        self._lock = threading.Lock()
        self._processes: set[ChildProcess] = set()
        self._idle: list[ChildProcess] = []
        self.is_closed = False

    def take_idle(self) -> ChildProcess | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def start(self) -> ChildProcess:
        """Start a process. Raises `EOFError` if the pool is closed, `OSError` if no process can be started."""
        # The lock is held until the process is in the set: `close` must find it, or it would outlive the server.
        with self._lock:
            if self.is_closed:
                raise EOFError
            process = self._new()
            self._processes.add(process)
            return process

    def give_back(self, process: ChildProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def end(self, process: ChildProcess) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)

    def close(self) -> None:
        """End all processes, even those in use, and start no more."""
        self.is_closed = True  # before taking the unfair lock, which threads that start processes might keep
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            self.end(process)


class ChildProcess:
    """A bounded child, which runs `main(timeout)` of a module. One thread at a time uses it; any thread may kill it.

    `packages` are the `__file__` of each package that this module imports.
    """

    def __init__(self, main: str, packages: Sequence[str], timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        try:
            self._process = start_process(
                [sys.executable, "-I", "-S", "-B", "-c", _MAIN.format(main), str(timeout), *_paths(packages)],
                {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                stdin=theirs.fileno(),
                stdout=watched,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        except BaseException:
            self._socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(watched)
        self._ended = threading.Lock()
        self._is_there = False

    def exchange(self, message: bytes, seconds: float, longest: float = math.inf) -> tuple[int, str]:
        """Send `message`, and return the kind and text of the answer, which has at most `longest` bytes. Raises
        `TimeoutError` after `seconds`, `OSError`, `EOFError`, and `UnicodeDecodeError`."""
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
        """Kill the process and free everything it holds. May be called twice."""
        if self._ended.acquire(blocking=False):
            self._process.kill()
            self._process.wait()
            self._socket.close()
            os.close(self._lifeline)


def _paths(packages: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(str(Path(file).resolve().parents[1]) for file in (__file__, *packages)))


# ----------------------------------------------------------------------------------------------------------- any child
# The start and the end of a child process of any kind: bounded children, engines, ranks.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    *,
    stdin: int = subprocess.DEVNULL,
    death_signal: signal.Signals | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a child that calls `engine.child_main.ignore_signals`. `options` are those of `Popen`. Raises `OSError`.

    Until that call, SIGINT, SIGTERM and SIGHUP are blocked in the child. When the thread that called this ends, the
    kernel sends `death_signal` to the child, even if the child is stopped.
    """
    if death_signal is not None:
        options["preexec_fn"] = partial(send_at_parents_end, death_signal)  # one system call
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        return subprocess.Popen(command, env=environment, stdin=stdin, **options)  # noqa: S603 - our own commands
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ForkServer:
    """A process that has imported what its forks need, so they start within hundredths of a second. Thread-safe.

    `command` must call `engine.child_main.serve_forks` with its last argument, a descriptor. The forks become children
    of this process, and so do all processes below it that lose their parent.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(START_SECONDS)
        self._lock = threading.Lock()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with theirs:
            arguments = [*command, FORKS, str(theirs.fileno())]
            self._process = start_process(arguments, environment, pass_fds=(theirs.fileno(),))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, argument: str, descriptor: int) -> Fork:
        """Start a process with these two arguments; the descriptor is copied. Blocks. Raises `OSError`."""
        with self._lock:
            socket.send_fds(self._socket, [argument.encode()], [descriptor])
            if not (pid := int.from_bytes(self._socket.recv(4), "little")):
                raise ConnectionResetError("the process that forks has ended")
        return Fork(pid)

    def close(self) -> None:
        """End the process. Its forks go on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Fork:
    """A child of this process that a `ForkServer` started. Its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def send_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel send this signal to the calling process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def end_in_words(status: int) -> str:
    """Describe how the process with this `Popen.returncode` ended."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"has ended with status {status}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
