"""The guard of all open connections: it limits their number and how long each may keep the server waiting.

`app.http.hypercorn` reports each connection to the guard; `app.application` runs the guard. A connection is idle while
no request on it is being answered. When the server is full, the connection that has kept it waiting for longest is
closed for a new one. The guard promises, on every event loop:

1. A connection without a request is closed after Hypercorn's `keep_alive_timeout`. The time runs from the opening of
   the connection or from its last answer, and only a complete request head stops it.
2. An HTTP/1 request head that has begun must be complete within `body_timeout`, or its connection is closed.
3. A connection on which data waits to be sent for `send_timeout` is aborted. The scope of an answer (`app.http.scope`)
   does this itself, because it can record why; the guard does it a little later for all other data. A connection that
   is being closed and does not end within that time is aborted, too.
4. There are never more than `max_connections` connections, nor more than `max_connections_per_address` from one
   address. To make room for a new connection the guard closes, in this order: the connection that has been closing for
   longest because its client does not read its last answer; the connection that has been idle for longest; the
   connection that its client has stalled for longest, by not sending or not reading. The first two are taken from the
   address with the most connections if it has any such, so that a flood from one address displaces itself. If all
   connections are being served, the new one gets an ordinary error body. A connection counts until it is closed.
5. When another server takes over the port, each connection gets one more answer, which announces the close; a
   connection that stays idle is closed after LAST_IDLE_SECONDS.
6. When the server ends, idle connections are closed at once, and all others before Hypercorn's own timeout ends.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio

from app.config.settings import Settings, SettingsError
from app.http.record import Seldom
from protocol.errors import ApiError

logger = logging.getLogger(__name__)

ENOUGH_FILES = 2**14  # the limit of open files is raised to this, if that is allowed
USUAL_CONNECTIONS = 2**13  # the largest default of `max_connections`
PER_ENGINE_PROCESS = 16  # descriptors: sockets, pipes, the heartbeat
AFTER_THE_SCOPE = 1.25  # times `send_timeout`: the scope of the answer aborts first, because it can record why
LAST_IDLE_SECONDS = 6.0  # longer than most client pools keep an idle connection, so that the client closes it first
STALLED_SECONDS = 1.0  # a connection may be displaced once its client has stalled it for so long

_RETRY = {"connection": "close", "retry-after": "5"}
FULL = ApiError(503, "The server has as many connections as it takes.", code="too_many_connections", headers=_RETRY)
FULL_FOR_ADDRESS = ApiError(
    429, "Your address has as many connections as it may have.", code="too_many_connections", headers=_RETRY
)


class Guarded(Protocol):
    """The methods of a connection that the guard uses."""

    @property
    def idle_timeout(self) -> float: ...
    @property
    def grace(self) -> float: ...
    @property
    def address(self) -> str | None: ...
    @property
    def has_part_of_a_head(self) -> bool: ...
    @property
    def has_unsent(self) -> bool: ...

    head_since: float | None  # written by the guard only: when a request head was first seen to have begun
    closing_since: float | None

    def seconds_blocked(self) -> float: ...
    def answer_once_more(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class ConnectionGuard:
    """The open connections of one server. `longest_stalled` returns, of the connections on which every request waits
    for the client, the one stalled for longest, and since when. It is called only if no connection is idle."""

    def __init__(
        self, settings: Settings, longest_stalled: Callable[[], tuple[Guarded, float] | None] = lambda: None
    ) -> None:
        self._send_timeout = AFTER_THE_SCOPE * settings.send_timeout
        self._head_timeout = settings.body_timeout
        self.limits = connection_limits(settings)
        self._max_per_address = settings.max_connections_per_address
        self._longest_stalled = longest_stalled
        self._open: dict[Guarded, str] = {}  # with the client's address; "" without one, or if the client has left
        self._idle: dict[Guarded, float] = {}  # since when, oldest first
        self._closing: dict[Guarded, float] = {}  # since when, oldest first
        self._made_room: set[Guarded] = set()  # ended to make room, and not counted any more
        self._refusing = 0
        self._per_address: Counter[str] = Counter()
        self._ending_since: float | None = None
        self._draining = False
        self._left = anyio.Event()  # set when a connection has been closed, while draining
        self._none_stalled_at = 0.0

    # --- called by connections

    def enter(self, connection: Guarded) -> ApiError | None:
        """Count a new connection. Return the error to refuse it with, or None. A refused one calls `leave_refused`."""
        address = _group(connection.address) or ""
        most = self._max_per_address
        crowded = address != "" and most is not None and self._per_address[address] >= most
        if crowded and not self._make_room(address):
            return self._refuse(connection, FULL_FOR_ADDRESS)
        if len(self._open) >= self.limits.connections:
            crowd = max(self._per_address, key=self._per_address.__getitem__, default=None)
            if not (self._make_room(crowd) or self._make_room() or self._abort_longest_stalled()):
                return self._refuse(connection, FULL)
        self._open[connection] = address
        self._per_address[address] += 1
        if self._draining:
            connection.answer_once_more()
        self.idle(connection)
        return None

    def leave(self, connection: Guarded) -> None:
        self._forget(connection)
        self._made_room.discard(connection)
        self._left.set()

    def closing(self, connection: Guarded) -> None:
        """Note that a connection will be closed once its unsent data has been sent."""
        self._idle.pop(connection, None)
        if connection in self._open:
            self._closing.setdefault(connection, time.monotonic())

    def leave_refused(self) -> None:
        """Stop counting a refused connection that is closed."""
        self._refusing -= 1

    def busy(self, connection: Guarded) -> None:
        """Note that a request has begun on the connection."""
        self._idle.pop(connection, None)
        connection.head_since = None

    def idle(self, connection: Guarded) -> None:
        """Note that from now on no request is in flight on the connection."""
        if connection not in self._open or connection in self._closing:
            return
        self._idle.pop(connection, None)
        self._idle[connection] = time.monotonic()
        if self._ending_since is not None:
            self._close(connection)

    # --- called by the server

    def drain(self) -> None:
        """End each connection after its next answer, because another server takes over the port."""
        self._draining = True
        for connection in self._open:
            connection.answer_once_more()

    async def wait_empty(self) -> None:
        while self._open:
            self._left = anyio.Event()
            await self._left.wait()

    def end(self) -> None:
        """Close idle connections now, others after their answer or when their time is up: the server ends."""
        self._ending_since = time.monotonic()
        for connection in list(self._idle):
            self._close(connection)

    async def watch(self) -> None:
        """Enforce the time limits of all connections, until cancelled."""
        timeout = min(self._send_timeout, self._head_timeout, 8.0)
        while True:
            await anyio.sleep(0.1 if self._draining or self._ending_since is not None else timeout / 8)
            await anyio.sleep(0.01)  # after a pause of the process, requests that have arrived are read first
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Close or abort every connection that is over one of its time limits. `now` is `time.monotonic()`."""
        for connection, since in list(self._idle.items()):
            if now - since >= (LAST_IDLE_SECONDS if self._draining else connection.idle_timeout):
                self._close(connection)
            elif not connection.has_part_of_a_head:
                connection.head_since = None
            elif connection.head_since is None:
                connection.head_since = now
            elif now - connection.head_since >= self._head_timeout:
                self._close(connection)
        for connection in [*self._open, *self._made_room]:
            closing_since = connection.closing_since
            if (
                connection.seconds_blocked() >= self._send_timeout
                or (closing_since is not None and now - closing_since >= self._send_timeout)
                or (self._ending_since is not None and now - self._ending_since >= connection.grace)
            ):
                connection.abort()

    # ---

    def _close(self, connection: Guarded) -> None:
        self.closing(connection)
        connection.close()

    def _forget(self, connection: Guarded) -> None:
        self._idle.pop(connection, None)
        self._closing.pop(connection, None)
        address = self._open.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def _make_room(self, address: str | None = None) -> bool:
        """End one connection without a request in flight, of this address if given. Return False if there is none."""
        return self._end_longest(self._closing, address) or self._end_longest(self._idle, address)

    def _end_longest(self, waiting: Mapping[Guarded, float], address: str | None) -> bool:
        now = time.monotonic()
        for connection, since in waiting.items():
            if address is not None and self._open[connection] != address:
                continue
            has_unsent = connection.has_unsent
            if has_unsent and now - since < STALLED_SECONDS:
                continue
            self._forget(connection)
            self._made_room.add(connection)
            if has_unsent:  # the client does not read; an orderly close would wait for it and keep the socket
                connection.abort()
            else:
                connection.close()
            return True
        return False

    def _abort_longest_stalled(self) -> bool:
        now = time.monotonic()
        if now - self._none_stalled_at < STALLED_SECONDS / 4:  # so that not every new connection causes a search
            return False
        found = self._longest_stalled()
        if found is None or now - found[1] < STALLED_SECONDS or found[0] not in self._open:
            self._none_stalled_at = now
            return False
        self._forget(found[0])
        self._made_room.add(found[0])
        found[0].abort()
        return True

    def _refuse(self, connection: Guarded, error: ApiError) -> ApiError:
        self._refusing += 1
        if self._refusing > self.limits.refusals:  # each of them holds a descriptor until its refusal is sent
            connection.abort()
        return error


@dataclass(frozen=True)
class Limits:
    """The numbers of connections that the process has file descriptors for."""

    connections: int
    refusals: int  # further connections, which are being sent their refusal
    newcomers: int  # further connections, which are accepted but not counted yet


def connection_limits(settings: Settings) -> Limits:
    """Return the limits of connections, after raising the limit of open files. Raises `SettingsError` if it is too low.

    Descriptors are set aside for files that are open already, for engine processes, for files that are opened from time
    to time, and for connections that are accepted but not counted yet.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < ENOUGH_FILES:  # the default is usually 1024, for programs that use select()
        limit = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    engines = (settings.max_data_parallel_size or settings.data_parallel_size) if settings.has_engine_processes else 0
    if settings.has_several_models:  # with the spare one; more if there are more descriptors
        engines = min(max(len(settings.models), 16) + 1, limit // (4 * PER_ENGINE_PROCESS))
    spare = max(32, limit // 8)
    room = limit - len(os.listdir("/dev/fd")) - engines * PER_ENGINE_PROCESS - spare
    if room < 1:
        raise SettingsError(
            f"This process may open {limit} files, which leaves none for connections. What works: ulimit -n 1024"
        )
    wanted = settings.max_connections
    if wanted is not None and wanted > room:
        raise SettingsError(
            f"max_connections: got {wanted}; allowed: 1 to {room}, because this process may open {limit} files. "
            f"A value that works: {room}; or allow it more files: ulimit -n {2 * wanted}"
        )
    return Limits(min(room, USUAL_CONNECTIONS) if wanted is None else wanted, spare // 4, spare // 2)


def _group(address: str | None) -> str | None:
    """Return the address that a client is counted by: for IPv6 its /64 network, which one subscriber commonly has."""
    if address is None or ":" not in address:
        return address
    try:
        host = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(host.ipv4_mapped or ipaddress.IPv6Network((int(host), 64), strict=False))


_other_scheme = Seldom()


def log_other_scheme(error: Exception | None = None, first_bytes: bytes = b"") -> None:
    """Log, now and then, that a client spoke HTTPS to a port of HTTP, or the other way round."""
    words = "HTTPS, and this port is HTTP. What works: http:// in its URL, or a server with ssl_certfile"
    if getattr(error, "reason", "") == "HTTP_REQUEST":
        words = "HTTP, and this port is HTTPS. What works: https:// in its URL"
    elif not first_bytes.startswith(b"\x16\x03"):  # a handshake of TLS
        return
    if _other_scheme.left_out() is not None:
        logger.warning("A client spoke %s", words)
