"""What has to be mended in Hypercorn 0.18 for a server of long streams that many clients visit briefly.

`app.application` and `app.runner` apply it before the first connection. What it promises, and why Hypercorn does not:

1. A connection whose client has left is closed at once. Hypercorn ends a connection when all of its tasks have ended,
   and one of them is the keep-alive timer, which nobody stops when the client hangs up. So every client that leaves
   without being told to (curl, a health probe) would cost a socket in CLOSE_WAIT and three tasks until the timer
   runs out: 75 s here, as it has to outlast the timers of proxies.
2. A client that does not read is noticed after some ten kilobytes, and can be cut. Kernel and transport would buffer
   megabytes by themselves, hours of a slow stream; and there is no way from an application to its connection, so
   `current_connection` finds it by a context variable, which every task of the connection inherits. A client that has
   closed its side without reading to the end is gone, too: on trio the send that waits for it cannot be cancelled.
3. The application is asked to drain before the listening socket is closed. Hypercorn closes it at once and tells the
   application last, so nothing could be refused politely and no probe could see that the server is going away.
4. A worker that fails makes the server fail. `hypercorn app:main` runs the application in a worker process and loses
   the status of one that has failed: it joins the remaining workers, of whom there are none, and returns theirs, 0.
   To systemd or Docker that reads as a server that is done.
5. A worker ends with the server. If Hypercorn's parent process is killed, its worker would serve on, on a port that
   nobody else can have and with a model that nobody can unload.
6. A connection fails alone. Whatever escapes from the task of one connection would, on trio, end the server.
7. A piece of a stream may go straight to the transport, on asyncio and HTTP/1.1. Through Starlette, Hypercorn and h11
   it passes fifteen calls, locks and checks, which cost several times what making the piece does.

`app.hypercorn_streams` has the rest: what concerns single streams, above all those of HTTP/2.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing.synchronize import SemLock
from typing import Any

from hypercorn.events import Event, RawData, Updated
from hypercorn.utils import ShutdownError

from app.hypercorn_streams import mend_streams

logger = logging.getLogger(__name__)

SEND_BUFFER = 64 * 1024  # bytes in the kernel, which accounts for twice as many
WRITE_BUFFER = 16 * 1024  # bytes in the transport beyond which send() waits

_SOCKET_IS_GONE = (OSError, ValueError)  # the latter is uvloop's, which has given the file descriptor away by then
_SERVERS = ("hypercorn.asyncio.run", "hypercorn.trio.run")
_connection: ContextVar[Connection | None] = ContextVar("headrace_connection", default=None)


def mend_connections() -> None:
    """Points 1, 2 and 6, for those of Hypercorn's workers that are imported in this process. Idempotent."""
    mend_streams()
    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None and not issubclass(module.TCPServer, Connection):
            module.TCPServer = type("TCPServer", (Connection, module.TCPServer), {})


def drain_before_shutdown(drain: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> None:
    """Point 3: `drain` gets what Hypercorn waits for, waits for it, and returns when the server may be shut down."""

    async def raise_shutdown(trigger: Callable[[], Awaitable[None]]) -> None:
        await drain(trigger)
        raise ShutdownError

    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None:
            module.raise_shutdown = raise_shutdown


def end_parent() -> None:
    """Point 4: end the process that Hypercorn started this one from, if any, by SIGUSR1, which it does not handle."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    # What it would have cleared away on a better day; otherwise a warning about it would have the last word in the log.
    # Before it ends, because point 5 ends this process then.
    gc.unfreeze()  # what is frozen would not be found
    for lock in gc.get_objects():
        if issubclass(type(lock), SemLock):  # isinstance would ask objects that warn when they are asked
            SemLock._cleanup(lock._semlock.name)  # type: ignore[attr-defined]
    with suppress(ProcessLookupError):  # it has ended already
        os.kill(parent.pid, signal.SIGUSR1)


def end_with_parent() -> None:
    """Point 5."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, name="end-with-parent", daemon=True).start()


def current_connection() -> Connection | None:
    """The connection that the current task serves; None if that is not under a mended Hypercorn."""
    return _connection.get()


class Connection:
    """Mixed into Hypercorn's `TCPServer`s, which for this purpose are nearly alike on asyncio and trio."""

    idle_task: Any
    _transport: Any = None  # asyncio's; trio has none
    _client_gone = False
    _num_sending = 0
    _sending_since = 0.0

    async def run(self) -> None:
        _connection.set(self)
        with suppress(*_SOCKET_IS_GONE):
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(self, "writer"):
            self._transport = self.writer.transport
            self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        try:
            await super().run()  # type: ignore[misc]  # of Hypercorn's class, as below
        except Exception:
            logger.exception("A connection has failed")

    def abort(self) -> None:
        """Close the connection now, with what has not been sent yet thrown away."""
        with suppress(*_SOCKET_IS_GONE):
            # Lingering for no time at all makes closing a reset: the kernel keeps nothing for a peer that never reads.
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if hasattr(self, "writer"):
            self.writer.transport.abort()
        else:
            with suppress(OSError):
                self._socket().shutdown(socket.SHUT_RDWR)  # ends send_all and receive_some; Hypercorn closes then

    def seconds_blocked(self) -> float:
        """For how long the client has not read what is being sent to it; 0 if nothing is."""
        return time.monotonic() - self._sending_since if self._num_sending else 0.0

    @property
    def takes_more(self) -> bool:
        """Whether `write_piece` may be called: no send is waiting, and the client keeps up."""
        transport = self._transport
        return (
            transport is not None
            and not self._num_sending
            and not self._client_gone
            and not transport.is_closing()
            and transport.get_write_buffer_size() < WRITE_BUFFER
        )

    def write_piece(self, data: bytes) -> None:
        """Write a piece of the body of an HTTP/1.1 answer whose head is out and says that it comes in chunks."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _socket(self) -> Any:
        if hasattr(self, "writer"):
            return self.writer.get_extra_info("socket")
        stream: Any = self.stream  # type: ignore[attr-defined]
        return getattr(stream, "transport_stream", stream).socket

    async def _read_data(self) -> None:
        await super()._read_data()  # type: ignore[misc]  # returns at the end of the client's bytes
        self._client_gone = True
        if self._num_sending:
            self.abort()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            if self._num_sending == 0:
                self._sending_since = time.monotonic()
            self._num_sending += 1
            try:
                await super().protocol_send(event)  # type: ignore[misc]
            finally:
                self._num_sending -= 1
                self._sending_since = time.monotonic()
        # An answer that ends after its client has left would start the timer again.
        elif not (self._client_gone and isinstance(event, Updated)):
            await super().protocol_send(event)  # type: ignore[misc]
