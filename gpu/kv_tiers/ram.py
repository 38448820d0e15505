"""Pieces in the memory of the host, for a device that has a memory of its own. Gone with the process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu.kv_tiers.worth import rank, victims


@dataclass(slots=True)
class _Entry:
    payload: NDArray[np.uint8]
    worth: float
    rank: float
    hits: int = 0


class RamStore:
    """As `gpu.kv_tiers.disk.DiskStore`. What other threads load is never written to again."""

    name = "ram"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[bytes, _Entry] = {}
        self._lock = threading.Lock()
        self._floor = 0.0
        self.num_bytes = 0

    def find(self, name: bytes) -> bool:
        return name in self._entries

    def load(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return False
            entry.hits += 1
            entry.rank = rank(self._floor, entry.worth, entry.hits)
        np.copyto(into, entry.payload)
        return True

    def store(self, name: bytes, payload: NDArray[np.uint8], worth: float) -> bool:
        if len(payload) > self._max_bytes:
            return False
        with self._lock:
            if name not in self._entries:
                entries = ((entry.rank, len(entry.payload), name) for name, entry in self._entries.items())
                for value, size, victim in victims(entries, self.num_bytes + len(payload), self._max_bytes):
                    self._floor = max(self._floor, value)
                    del self._entries[victim]
                    self.num_bytes -= size
                self._entries[name] = _Entry(payload.copy(), worth, rank(self._floor, worth, 0))
                self.num_bytes += len(payload)
        return True

    def discard(self, name: bytes) -> None:
        with self._lock:
            if (entry := self._entries.pop(name, None)) is not None:
                self.num_bytes -= len(entry.payload)

    def refresh(self) -> None: ...
