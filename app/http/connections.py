"""Every open connection: how many there may be, and how long each may keep the server waiting.

`app.http.hypercorn` tells the guard of each connection, `app.application` runs it. Two ideas carry it. A connection
is idle while no request on it is being answered; and who keeps the server waiting for longest makes room for a
newcomer. What it promises, on every event loop:

1. A connection without a request is closed after Hypercorn's `keep_alive_timeout`, whatever else comes in on it: the
   time runs from its opening or from its last answer, and only a whole head of a request stops it.
2. A head of HTTP/1 that has begun is whole within `body_timeout`, or its connection is closed.
3. A connection on which something waits to be sent for `send_timeout` is cut, whoever sends it: answers by their own
   scope (`app.http.scope`), which can say why, and all else a little later. So is one that does not end within that
   time once it was to be closed.
4. There are never more than `max_connections`, nor `max_connections_per_address` from one address. A newcomer takes the
   place of whoever does not read its last answer before the connection is closed, else of whoever has been idle for
   longest, both first among those of the address that has most, so that a crowd takes its own places; else of whoever
   has left its request or its answer waiting for longest. Only if all are being served is it refused, in the words of
   all other errors. A connection counts until it is closed, however long that takes.
5. Where the port goes on to another server, each connection gets one more answer, which says that it ends, and one
   that stays idle is closed after LAST_IDLE_SECONDS.
6. When the server ends, idle connections are closed at once and all others before Hypercorn's own timeout ends.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio

from app.config.settings import Settings, SettingsError
from protocol.errors import ApiError

ENOUGH_FILES = 2**14  # what the limit of open files is raised to, where that is allowed
USUAL_CONNECTIONS = 2**13  # at most, where no setting says more
PER_ENGINE_PROCESS = 16  # descriptors: sockets, pipes, the heartbeat
AFTER_THE_SCOPE = 1.25  # times `send_timeout`: two that cut the same client at once would not both know why
LAST_IDLE_SECONDS = 6.0  # longer than the pools of most clients keep a connection, so that it is they who close it
STALLED_SECONDS = 1.0  # that a client must keep its own request waiting before a newcomer takes its place

_RETRY = {"connection": "close", "retry-after": "5"}
FULL = ApiError(503, "The server has as many connections as it takes.", code="too_many_connections", headers=_RETRY)
FULL_FOR_ADDRESS = ApiError(
    429, "Your address has as many connections as it may have.", code="too_many_connections", headers=_RETRY
)


class Guarded(Protocol):
    """What the guard needs of a connection."""

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

    head_since: float | None  # the guard's own notes, as is the next
    closing_since: float | None

    def seconds_blocked(self) -> float: ...
    def answer_once_more(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class ConnectionGuard:
    """The connections of one server. `longest_stalled` finds the one whose client has kept all of its own requests
    waiting for longest, and since when; nobody asks it while there are idle ones."""

    def __init__(
        self, settings: Settings, longest_stalled: Callable[[], tuple[Guarded, float] | None] = lambda: None
    ) -> None:
        self._send_timeout = AFTER_THE_SCOPE * settings.send_timeout
        self._head_timeout = settings.body_timeout
        self.limits = connection_limits(settings)
        self._max_per_address = settings.max_connections_per_address
        self._longest_stalled = longest_stalled
        self._open: dict[Guarded, str] = {}  # with their addresses; "" for all that have none, or are gone already
        self._idle: dict[Guarded, float] = {}  # since when, the longest first
        self._closing: dict[Guarded, float] = {}  # since when, the longest first
        self._made_room: set[Guarded] = set()  # told to end at once, and counted no more
        self._refusing = 0
        self._per_address: Counter[str] = Counter()
        self._ending_since: float | None = None
        self._draining = False
        self._left = anyio.Event()  # set when a connection has been closed, while draining
        self._nobody_stalled_at = 0.0

    # --- what connections say

    def enter(self, connection: Guarded) -> ApiError | None:
        """A connection was opened. Returns why it must be refused, if it must; then it calls `leave_refused`."""
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
        """It is closed."""
        self._forget(connection)
        self._made_room.discard(connection)
        self._left.set()

    def closing(self, connection: Guarded) -> None:
        """It is being closed, once what is on its way has been sent."""
        self._idle.pop(connection, None)
        if connection in self._open:
            self._closing.setdefault(connection, time.monotonic())

    def leave_refused(self) -> None:
        """One that had to be refused is closed."""
        self._refusing -= 1

    def busy(self, connection: Guarded) -> None:
        """A request has begun on it."""
        self._idle.pop(connection, None)
        connection.head_since = None

    def idle(self, connection: Guarded) -> None:
        """No request is in flight on it, as from now."""
        if connection not in self._open or connection in self._closing:
            return
        self._idle.pop(connection, None)
        self._idle[connection] = time.monotonic()
        if self._ending_since is not None:
            self._close(connection)

    # --- what the server says

    def drain(self) -> None:
        """The port goes on to another server: each connection ends after its next answer."""
        self._draining = True
        for connection in self._open:
            connection.answer_once_more()

    async def wait_empty(self) -> None:
        """Until no connection is open."""
        while self._open:
            self._left = anyio.Event()
            await self._left.wait()

    def end(self) -> None:
        """The server ends."""
        self._ending_since = time.monotonic()
        for connection in list(self._idle):
            self._close(connection)

    async def watch(self) -> None:
        """Hold every connection to its limits, until cancelled."""
        timeout = min(self._send_timeout, self._head_timeout, 8.0)
        while True:
            await anyio.sleep(0.1 if self._draining or self._ending_since is not None else timeout / 8)
            await anyio.sleep(0.01)  # what came while the process stood still is read first: it makes connections busy
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """End what has taken too long."""
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
        """End a connection, of this address if that is given, on which no request is being answered."""
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
            if has_unsent:  # and the client does not read it: closing in order would keep the socket
                connection.abort()
            else:
                connection.close()
            return True
        return False

    def _abort_longest_stalled(self) -> bool:
        now = time.monotonic()
        if now - self._nobody_stalled_at < STALLED_SECONDS / 4:  # newcomers may come faster than all can be looked at
            return False
        found = self._longest_stalled()
        if found is None or now - found[1] < STALLED_SECONDS or found[0] not in self._open:
            self._nobody_stalled_at = now
            return False
        self._forget(found[0])
        self._made_room.add(found[0])
        found[0].abort()
        return True

    def _refuse(self, connection: Guarded, error: ApiError) -> ApiError:
        self._refusing += 1
        if self._refusing > self.limits.refusals:  # saying so takes descriptors, too
            connection.abort()
        return error


@dataclass(frozen=True)
class Limits:
    """What the process has descriptors for, beside what it needs itself."""

    connections: int
    refusals: int  # more connections, which are told why they cannot stay
    newcomers: int  # more connections, which wait for being counted


def connection_limits(settings: Settings) -> Limits:
    """Raises the process's limit of open files as far as that helps. Raises `SettingsError` if it does not suffice.

    Beside connections the process needs descriptors for what is open already, for its engines, and for files that it
    opens now and then; and newcomers take one each before they can be counted.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < ENOUGH_FILES:  # usually 1024, for the sake of programs that use select()
        limit = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    engines = (
        PER_ENGINE_PROCESS * (settings.max_data_parallel_size or settings.data_parallel_size)
        if settings.has_engine_processes
        else 0
    )
    spare = max(32, limit // 8)
    room = limit - len(os.listdir("/dev/fd")) - engines - spare
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
    """Whom an address counts for: of IPv6, all that a subscriber commonly has."""
    if address is None or ":" not in address:
        return address
    try:
        host = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(host.ipv4_mapped or ipaddress.IPv6Network((int(host), 64), strict=False))
