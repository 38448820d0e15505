"""The start of a bounded child process: limits, framing, and the watchdog that ends it with its parent.

`protocol.jinja_sandbox` renders templates in one; `engine.child` is its parent. Such a process (a bounded child) has no
secrets, no files and no network, and can neither start a process nor write a file. Its standard input is a socket to
its parent, its standard output the reading end of a lifeline.

Every message is a kind (1 byte), a length (8 bytes) and UTF-8, in which lone surrogates pass. The first one says that
the process is there, from when on the parent's clock runs. It ends by its parent's word (the socket's end), by its
parent's end (the lifeline's), or by SIGKILL at the deadline, which the parent watches. It ignores SIGINT and SIGTERM,
which reach a whole group at once.
"""

from __future__ import annotations

import codecs
import fcntl
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
"""Bytes of address space. The longest rendering allowed needs half of it, in the widest characters."""

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HEADER = struct.Struct(">BQ")
_PIECE = 2**18


def serve(answer: Callable[[bytearray], tuple[int, bytes]], timeout: float) -> None:
    """Answer the parent's messages until it closes the socket. `timeout`: seconds of the processor for each."""
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
    """One message. `deadline` is one of `time.monotonic`. Raises `OSError`."""
    for piece in (_HEADER.pack(kind, len(payload)), payload):
        _wait_until(deadline, to)
        to.sendall(piece)  # the socket's timeout is one for all of it


def receive(source: socket.socket, longest: float = math.inf, deadline: float | None = None) -> tuple[int, bytearray]:
    """The kind and payload of the next message. Raises `OSError`, `EOFError` at the end or beyond `longest` bytes."""
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
    """UTF-8, lone surrogates included: messages may hold them."""
    return text.encode("utf-8", "surrogatepass")


def to_text(received: bytearray) -> str:
    """What `to_bytes` was given. Raises `UnicodeDecodeError`."""
    # In pieces, because each of them keeps the interpreter to itself.
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
    # Nothing is ever written to the lifeline, so the kernel's one message about it is that its other end was closed. It
    # comes as SIGKILL, because a template may be in a call of C in which Python would not look at anything milder.
    # (PR_SET_PDEATHSIG would watch the parent's thread, which ends when that has been idle.)
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
    # The backstop for a parent that does not watch its clock. Time that was used counts for ever, so the limit moves.
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


# ----------------------------------------------------------------------------------------------------- end when stopped
# A process that is stopped answers nobody, and cannot say so: a child of its own sees it, and kills it.
#
# For those whose parent is not ours; where it is, it is told (`gpu.parallel.multiproc`). What is looked at is the
# state, not silence: a busy machine is not taken for a stopped process.


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
    """From now on this process is killed when it is stopped, and so is known to have ended."""
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
