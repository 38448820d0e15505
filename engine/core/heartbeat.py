"""The engine's heartbeat: written by the engine, read by a watchdog in another thread or process."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from engine.config import Clock

_LAST_PROGRESS, _IS_AWAKE, _KV_SEQUENCE = range(3)
_SIZE = 3 * 8  # bytes: three doubles; each is written and read atomically
_PAGE = bytes(mmap.PAGESIZE)  # an empty file cannot be mapped


class Heartbeat:
    """The time of the engine's last progress, whether it is idle, and the number of its latest KV events. All zeros
    mean that the engine does not run yet.

    It is a few bytes of memory, which two processes can map. It does not pass through a queue: a slow queue would make
    a busy engine look hung, and a hung engine look alive.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._fields = memoryview(bytearray(_SIZE) if memory is None else memory)[:_SIZE].cast("d")

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        path.write_bytes(_PAGE)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Heartbeat:
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), len(_PAGE)))

    @property
    def last_progress(self) -> float:
        """The time, by the engine's clock, when the latest step ended or the engine woke up; 0 before that."""
        return self._fields[_LAST_PROGRESS]

    @property
    def is_asleep(self) -> bool:
        return not self._fields[_IS_AWAKE]

    @property
    def kv_sequence(self) -> int:
        """The number of the latest `engine.kv_events.KVEvents`, which may be on its way; 0 before any."""
        return int(self._fields[_KV_SEQUENCE])

    def count_kv_events(self, sequence: int) -> None:
        self._fields[_KV_SEQUENCE] = sequence

    def beat(self) -> None:
        self._fields[_LAST_PROGRESS] = self._clock()

    def sleep(self) -> None:
        """Record that the engine is idle until a command arrives."""
        self._fields[_IS_AWAKE] = 0.0

    def wake(self) -> None:
        """Record that a command has arrived: the time without progress counts from here."""
        self.beat()
        self._fields[_IS_AWAKE] = 1.0

    def show(self, last_progress: float, *, is_asleep: bool, kv_sequence: int) -> None:
        """Write the heartbeat of an engine on another machine, converted to this machine's clock."""
        self._fields[_KV_SEQUENCE] = kv_sequence
        self._fields[_LAST_PROGRESS] = last_progress
        self._fields[_IS_AWAKE] = float(not is_asleep)
