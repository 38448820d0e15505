"""Fair sharing between tenants: a queue and threads that serve them in turn, and a shared cache."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import current_token

T = TypeVar("T")

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""The name of the tenant of the request that is being answered. The server sets it for each request."""


class RoundRobin(Generic[T]):
    """A queue that serves tenants in turn, and the items of one tenant first in, first out. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()  # the first tenant is served next
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, item: T) -> None:
        """Append an item that is not queued. A tenant without queued items is served after all others."""
        self._lines.setdefault(tenant, OrderedDict())[item] = None
        self._size += 1

    def discard(self, tenant: str, item: T) -> bool:
        """Remove an item. Return False if it is not queued."""
        line = self._lines.get(tenant, OrderedDict())
        if item not in line:
            return False
        del line[item]
        self._size -= 1
        if not line:
            del self._lines[tenant]
        return True

    def pop(self, busy: Collection[str] = ()) -> T | None:
        """Remove and return the oldest item of the next tenant that is not `busy`; None if there is none.

        Looks at no more tenants than are busy.
        """
        tenant = next((tenant for tenant in self._lines if tenant not in busy), None)
        if tenant is None:
            return None
        line = self._lines[tenant]
        item, _ = line.popitem(last=False)
        self._size -= 1
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return item


class FairThreads:
    """Runs functions on at most `size` threads at a time. Tenants take turns. Belongs to an event loop.

    anyio's limiter serves callers by arrival, so one prompt would wait for all prompts of a busy tenant. And it counts
    callers: functions of cancelled callers would run on in addition to those of the next callers.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: RoundRobin[anyio.Event] = RoundRobin()
        self._unlimited = anyio.CapacityLimiter(math.inf)

    async def run(self, function: Callable[[], T], *, abandon: bool = True) -> T:
        """Return what `function` returns. If the caller is cancelled, a function that has begun runs to its end and
        keeps its thread until then; a function that has not begun never runs.

        Without `abandon` a cancelled caller waits for the function's end. Use it if the function changes shared state.
        """
        await self._take_turn(current_tenant.get())
        # The thread, or the caller if it is cancelled first, takes this item; whichever takes it gives the turn back.
        first_comes = iter((True,))
        call_soon = threadsafe_call_soon()

        def work() -> T | None:
            if not next(first_comes, False):
                return None
            try:
                return function()
            finally:
                with suppress(RuntimeError):  # the event loop has ended
                    call_soon(self._give_back)

        try:
            result = await to_thread.run_sync(work, abandon_on_cancel=abandon, limiter=self._unlimited)
        finally:
            if next(first_comes, False):
                self._give_back()
        return result  # type: ignore[return-value]  # None is returned only to a cancelled caller

    async def _take_turn(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        self._waiting.push(tenant, turn)
        try:
            await turn.wait()
        except BaseException:
            if not self._waiting.discard(tenant, turn):
                self._give_back()
            raise

    def _give_back(self) -> None:
        if (turn := self._waiting.pop()) is not None:
            turn.set()
        else:
            self._free += 1


class TenantLRU(Generic[T]):
    """A cache of at most `max_entries` and `max_bytes`, by tenant and key. Thread-safe.

    If a limit is exceeded, the tenant with the most entries (or bytes) loses its least recently used entry. So a tenant
    with many entries cannot evict those of others.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: dict[str, OrderedDict[Hashable, tuple[T, int]]] = {}  # value and size; the latest used last
        self._num_bytes: Counter[str] = Counter()  # by tenant
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def find(self, tenant: str, key: Hashable) -> T | None:
        """Return an entry, which becomes the latest used of its tenant; None if there is none."""
        with self._lock:
            if key not in (entries := self._entries.get(tenant, OrderedDict())):
                return None
            entries.move_to_end(key)
            return entries[key][0]

    def keep(self, tenant: str, key: Hashable, value: T, num_bytes: int) -> None:
        """Add or replace an entry of this size."""
        with self._lock:
            entries = self._entries.setdefault(tenant, OrderedDict())
            self._num_bytes[tenant] += num_bytes - entries.pop(key, (value, 0))[1]
            entries[key] = value, num_bytes
            while len(self) > self._max_entries:
                self._evict(max(self._entries, key=lambda tenant: len(self._entries[tenant])))
            while self.num_bytes > self._max_bytes:
                self._evict(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _evict(self, tenant: str) -> None:
        _, (_, num_bytes) = self._entries[tenant].popitem(last=False)
        self._num_bytes[tenant] -= num_bytes
        if not self._entries[tenant]:
            del self._entries[tenant], self._num_bytes[tenant]


def threadsafe_call_soon() -> Callable[[Callable[[], None]], Any]:
    """Return a function that has the current event loop call a function soon. Any thread may call it; it never waits,
    and raises RuntimeError if the loop has ended."""
    loop: Any = current_token().native_token
    call_soon: Callable[[Callable[[], None]], Any] = (
        loop.call_soon_threadsafe if hasattr(loop, "call_soon_threadsafe") else loop.run_sync_soon
    )
    return call_soon
