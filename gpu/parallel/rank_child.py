"""The driver's handle of one rank's process: starts it, receives from it, and tells why it ended.

A thread waits for its end, and for a signal that stops it, which is as good as an end: the kernel tells both at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from gpu.parallel.messages import RankSetup, Up, decode_up

LONGEST_MESSAGE = 2**30  # bytes

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class RankChild:
    """A process of one rank, whose main is `module`. `on_end(index, why)` is called once, on a thread of its own."""

    def __init__(self, index: int, module: str, setup: RankSetup, on_end: Callable[[int, str], None]) -> None:
        self.index = index
        self._on_end = on_end
        ours, theirs = socket.socketpair()
        started: Future[subprocess.Popen[bytes]] = Future()
        with theirs:
            passed = (theirs.fileno(), *setup.descriptors)
            self._watcher = threading.Thread(
                target=self._live, args=(module, passed, started), name=f"rank-{index}", daemon=True
            )
            self._watcher.start()
            self._process = started.result()
        self.connection = Connection(ours.detach())
        self.connection.send_bytes(msgspec.msgpack.encode(setup, enc_hook=int))  # sizes are ints of a kind of their own

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds_without_a_core(self) -> float:
        """As the function, of this process."""
        return seconds_without_a_core(self.pid)

    def receive(self) -> Up:
        """The next thing that it says. Waits for it; raises EOFError when it has ended."""
        try:
            return decode_up(self.connection.recv_bytes(LONGEST_MESSAGE))
        except OSError as error:  # the connection is reset, or a message cut off
            raise EOFError from error

    def kill(self) -> None:
        """At once, whatever it does. Nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)  # not `Popen.kill`, which would reap it

    def wait_told(self) -> None:
        """Wait until `on_end` has been called, of a process that has ended."""
        self._watcher.join()

    def join(self) -> None:
        """Wait for its end, and let go of it. Once."""
        self._watcher.join()
        self._process.wait()
        self.connection.close()

    def _live(self, module: str, passed: Sequence[int], started: Future[subprocess.Popen[bytes]]) -> None:
        # It is started here, because the kernel ends it with the thread that has started it.
        try:
            process = _start(module, passed, self.index)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        # Left to be waited for, so that its number is not another's before all who know it are done with it.
        what = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert what is not None
        if what.si_code == os.CLD_EXITED:
            self._on_end(self.index, f"has ended with status {what.si_status}")
        elif what.si_code == os.CLD_STOPPED:
            self._on_end(self.index, f"was stopped by {_name(what.si_status)}")
        else:
            self._on_end(self.index, f"was killed by {_name(what.si_status)}")


def _start(module: str, passed: Sequence[int], index: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", module, str(passed[0]), f"rank={index}"],  # the last for ps
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, before it could be stopped
        pass_fds=passed,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},  # what it needs is in the cache by now
    )


def seconds_without_a_core(pid: int) -> float:
    """For how long a process' threads, all in all, could have run and were not let; 0 where the kernel does not say.

    Of all threads: while one waits for a core, the main thread may be waiting for it.
    """
    nanoseconds = 0
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this one has
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _end_with_parent() -> None:
    """Have the kernel kill this process with the one that has started it, even if it is stopped then."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
