"""Compiled grammars, and refusals, by whose they are.

What is in it answers quicker, so an entry belongs to one owner (tenant and `cache_salt`): else time would tell what
others have asked for. When it is full, the tenant that holds most loses what it has not used for longest, so nobody
can push out the entries of others by using many.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from engine.messages import StructuredOutput
from engine.structured.compile_queue import Owner

MAX_CACHED_GRAMMARS = 128
MAX_CACHED_BYTES = 256 * 2**20  # as far as the compiler can tell

T = TypeVar("T")


class _Share(Generic[T]):
    """What one tenant holds."""

    __slots__ = ("entries", "num_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, StructuredOutput], tuple[T, int]] = OrderedDict()  # the latest used last
        self.num_bytes = 0


class GrammarCache(Generic[T]):
    """Thread-safe, never blocks for long."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share[T]] = {}  # of tenants that hold something
        self._num_entries = 0
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_entries

    def find(self, owner: Owner, structured: StructuredOutput) -> T | None:
        with self._lock:
            share = self._shares.get(owner.tenant)
            if share is None:
                return None
            found = share.entries.get((owner.salt, structured))
            if found is not None:
                share.entries.move_to_end((owner.salt, structured))
                return found[0]
            return None

    def keep(self, owner: Owner, structured: StructuredOutput, value: T, num_bytes: int) -> None:
        """Keep what holds about so much memory, its text included."""
        with self._lock:
            share = self._shares.setdefault(owner.tenant, _Share())
            key = owner.salt, structured
            if key in share.entries:
                self._count(share, -1, -share.entries.pop(key)[1])
            self._count(share, 1, num_bytes)
            share.entries[key] = value, num_bytes
            while self._num_entries > MAX_CACHED_GRAMMARS:
                self._evict(max(self._shares, key=lambda tenant: len(self._shares[tenant].entries)))
            while self._num_bytes > MAX_CACHED_BYTES:
                self._evict(max(self._shares, key=lambda tenant: self._shares[tenant].num_bytes))

    def _evict(self, tenant: str) -> None:
        share = self._shares[tenant]
        _, (_, num_bytes) = share.entries.popitem(last=False)
        self._count(share, -1, -num_bytes)
        if not share.entries:
            del self._shares[tenant]

    def _count(self, share: _Share[T], entries: int, num_bytes: int) -> None:
        self._num_entries += entries
        self._num_bytes += num_bytes
        share.num_bytes += num_bytes
