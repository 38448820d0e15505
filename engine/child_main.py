"""The child's side of child processes: the limits and messages of a bounded child, and the end with the parent.

1. A bounded child has no secrets, no files and no network, and can neither start a process nor write a file. Its
   standard input is a socket to its parent (`engine.child`), its standard output a lifeline: a pipe that the parent
   keeps open.
2. Every message is a kind (1 byte), a length (8 bytes) and UTF-8, which may have lone surrogates. The child sends the
   first message when it is ready; only then does the parent send a message and count its deadline.
3. A bounded child ends when the socket or the lifeline is closed, or by SIGKILL from its parent at a deadline.
"""

from __future__ import annotations

import codecs
import fcntl
import gc
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

MEMORY_LIMIT = 2**30
"""Bytes of address space: twice what the longest allowed rendering of a template needs."""

FORKS = "--forks"
"""The argument of a process that forks others."""

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HEADER = struct.Struct(">BQ")
_PIECE = 2**18


def serve(answer: Callable[[bytearray], tuple[int, bytes]], timeout: float) -> None:
    """Answer the parent's messages until it closes the socket, each in at most `timeout` seconds of CPU time."""
    ignore_signals()
    _end_with_parent()
    _limit_resources()
    with socket.socket(fileno=0) as parent, suppress(EOFError, OSError):
        send(parent, 0, b"")
        while True:
            _, message = receive(parent)
            _limit_time(timeout)
            kind, payload = answer(message)
            send(parent, kind, payload)


def send(to: socket.socket, kind: int, payload: bytes, deadline: float | None = None) -> None:
    """Send one message. `deadline` is a time of `time.monotonic`. Raises `OSError`."""
    for piece in (_HEADER.pack(kind, len(payload)), payload):
        _wait_until(deadline, to)
        to.sendall(piece)  # the socket's timeout covers the whole call


def receive(source: socket.socket, longest: float = math.inf, deadline: float | None = None) -> tuple[int, bytearray]:
    """Return the kind and payload of the next message. Raises `OSError`, and `EOFError` at the end of the messages or
    for more than `longest` bytes."""
    kind, size = _HEADER.unpack(_exactly(source, _HEADER.size, deadline))
    if size > longest:
        raise EOFError
    return kind, _exactly(source, size, deadline)


def _exactly(source: socket.socket, size: int, deadline: float | None) -> bytearray:
    received = bytearray()
    while len(received) < size:
        _wait_until(deadline, source)
        piece = source.recv(min(size - len(received), _PIECE))
        if not piece:
            raise EOFError
        received += piece
    return received


def _wait_until(deadline: float | None, waits: socket.socket) -> None:
    if deadline is not None:
        waits.settimeout(max(deadline - time.monotonic(), 0.001))


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8, lone surrogates included: messages may hold them."""
    return text.encode("utf-8", "surrogatepass")


def to_text(received: bytearray) -> str:
    """Undo `to_bytes`. Raises `UnicodeDecodeError`."""
    # In pieces, because the interpreter lock is released only between two calls of `decode`.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    view = memoryview(received)
    pieces = [decoder.decode(view[start : start + _PIECE]) for start in range(0, len(view), _PIECE)]
    return "".join(pieces) + decoder.decode(b"", final=True)


def ignore_signals(*others: signal.Signals) -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP, which reach a whole process group at once, and `others`."""
    for number in (*GROUP_SIGNALS, *others):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # `engine.child.start_process` has blocked them


def _end_with_parent() -> None:
    # Nothing is ever written to the lifeline, so the kernel signals only that its other end was closed. The signal is
    # SIGKILL, because a template may be in a C call, in which Python would not handle any other signal.
    # (PR_SET_PDEATHSIG would watch the parent's thread, which ends when it has been idle.)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(1, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_ASYNC)


def _limit_resources() -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, this process goes first
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 16),  # Jinja imports a few modules on first use
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, allowed))


def _limit_time(timeout: float) -> None:
    # A second limit, in case the parent does not keep the deadline. Used time is never reset, so the limit moves.
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def serve_forks(descriptor: int) -> list[str]:
    """Fork this process, which has one thread, for each message of the parent (`engine.child.ForkServer`), until it
    closes the socket. Return in the fork, with its two arguments: the message and a descriptor."""
    ignore_signals()
    gc.collect()
    gc.freeze()  # forks share the pages of objects that no garbage collection visits
    with socket.socket(fileno=descriptor) as parent:
        while True:
            message, (*given,), _, _ = socket.recv_fds(parent, 4096, 1)
            if not message:
                os._exit(0)
            source, sink = os.pipe()
            if (between := os.fork()) == 0:
                if (child := os.fork()) == 0:
                    os.close(source)
                    os.close(sink)
                    return [message.decode(), *map(str, given)]
                os.write(sink, child.to_bytes(4, "little"))
                os._exit(0)  # makes the fork a child of the parent
            os.close(sink)
            os.waitpid(between, 0)
            parent.sendall(os.read(source, 4) or bytes(4))  # zeros: there is no fork
            for each in (source, *given):
                os.close(each)


# ----------------------------------------------------------------------------------------------------- end when stopped
# A stopped process (SIGSTOP) cannot answer, so it starts a child that watches its state and kills it. Only processes
# that another program starts need this; ours watch their children (`gpu.parallel.multiproc`).


_WATCH = """
import os, signal, sys, time
watched = int(sys.argv[1])
while os.getppid() == watched:
    with open(f"/proc/{watched}/stat") as stat:
        if stat.read().rpartition(")")[2].split()[0] == "T":
            os.kill(watched, signal.SIGKILL)
    time.sleep(0.1)
"""


def end_when_stopped() -> None:
    """Start a child that kills this process when it is stopped, so that other processes see it end."""
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
