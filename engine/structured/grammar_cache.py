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
MAX_CACHED_CHARACTERS = 4 * 2**20  # of their texts: what a grammar compiles to grows with its text

T = TypeVar("T")


class _Share(Generic[T]):
    """What one tenant holds."""

    __slots__ = ("entries", "num_characters")

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, StructuredOutput], T] = OrderedDict()  # the latest used last
        self.num_characters = 0


class GrammarCache(Generic[T]):
    """Thread-safe, never blocks for long."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share[T]] = {}  # of tenants that hold something
        self._num_entries = 0
        self._num_characters = 0
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
            return found

    def keep(self, owner: Owner, structured: StructuredOutput, value: T) -> None:
        with self._lock:
            share = self._shares.setdefault(owner.tenant, _Share())
            key = owner.salt, structured
            if key not in share.entries:
                self._count(share, 1, len(structured.value))
            share.entries[key] = value
            share.entries.move_to_end(key)
            while self._num_entries > MAX_CACHED_GRAMMARS:
                self._evict(max(self._shares, key=lambda tenant: len(self._shares[tenant].entries)))
            while self._num_characters > MAX_CACHED_CHARACTERS:
                self._evict(max(self._shares, key=lambda tenant: self._shares[tenant].num_characters))

    def _evict(self, tenant: str) -> None:
        share = self._shares[tenant]
        (_, structured), _ = share.entries.popitem(last=False)
        self._count(share, -1, -len(structured.value))
        if not share.entries:
            del self._shares[tenant]

    def _count(self, share: _Share[T], entries: int, characters: int) -> None:
        self._num_entries += entries
        self._num_characters += characters
        share.num_characters += characters
