"""A tier without threads or files over the simulated executor's memory: what it keeps are the digests in the slots.

What is there, what comes when and what fails is drawn from a seed, so every history can be had again. Since every read
of the executor is checked, a chunk that gets into the wrong block is a `PlanViolation`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.messages import TierStats
from engine.plan import NO_BLOCK
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.queueing_executor import QueueingExecutor


@dataclass
class Chunk:
    slots: list[tuple[int, int] | None]
    tenants: list[str]


class SimulatedTier:
    """An `engine.scheduler.tiers.BlockTier`. `writers` has the tenant whose tokens a block holds, which
    `before_copy` brings up to date."""

    key = b"key of the directory".ljust(32)
    store_seconds = 0.0
    is_storing = has_news = False

    def __init__(
        self,
        executor: CheckedExecutor,
        writers: dict[int, str],
        *,
        blocks_per_chunk: int = 1,
        seed: int = 0,
        failures: float = 0.1,
        before_copy: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.chunks: dict[bytes, Chunk] = {}
        self.seen: Counter[str] = Counter()
        self.touched: list[bytes] = []  # by the last call
        self._executor = executor
        self._writers = writers
        self._draw = random.Random(seed)
        self._failures = failures
        self._before_copy = before_copy
        self._wanted: list[tuple[int, int, bytes, list[int]]] = []
        self._tickets = 0

    def find(self, name: bytes) -> bool:
        return name in self.chunks

    def is_cheaper(self, seconds: float) -> bool:
        return self._draw.random() < 0.9

    def load(self, names: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> int:
        self._tickets += 1
        self._wanted += [
            (self._tickets, i, *each) for i, each in enumerate(zip(names, map(list, block_ids), strict=True))
        ]
        self.seen["loads"] += 1
        return self._tickets

    def cancel(self, ticket: int) -> None:
        left = [wanted for wanted in self._wanted if wanted[0] != ticket]
        self.seen["loads cut short"] += len(left) < len(self._wanted)
        self._wanted = left

    def poll(self, seconds: float) -> list[tuple[int, int, str | None]]:
        self._draw.shuffle(self._wanted)
        count = self._draw.choice([0, 0, self._draw.randint(0, len(self._wanted))])
        arrived, self._wanted = self._wanted[:count], self._wanted[count:]
        return [(ticket, index, self._copy_in(name, block_ids)) for ticket, index, name, block_ids in arrived]

    def store(self, name: bytes, block_ids: Sequence[int]) -> bool:
        if self._draw.random() < 0.2:
            return False
        self._run_what_is_queued()
        slots = [self._executor._memory[slot] for block_id in block_ids for slot in self._slots(block_id)]
        self.chunks[name] = Chunk(slots, [self._writers[block_id] for block_id in block_ids])
        self.seen["stores"] += 1
        return True

    def touch(self, names: Sequence[bytes]) -> None:
        self.touched = list(names)

    def discard(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.chunks.pop(name, None)

    def wait(self) -> None: ...

    def take_stats(self) -> list[TierStats] | None:
        return None

    def close(self) -> None: ...

    def _copy_in(self, name: bytes, block_ids: list[int]) -> str | None:
        chunk = self.chunks.get(name)
        if chunk is None or self._draw.random() < self._failures:
            self.seen["chunks that could not be had"] += 1
            if self._draw.random() < 0.5:
                self.discard([name])
            return None
        self._run_what_is_queued()
        values = iter(chunk.slots)
        for block_id, tenant in zip(block_ids, chunk.tenants, strict=True):
            content = [next(values) for _ in range(self._executor.block_size)]
            if block_id != NO_BLOCK:
                for slot, value in zip(self._slots(block_id), content, strict=True):
                    self._executor._memory[slot] = value
                self._writers[block_id] = tenant
        self.seen["chunks loaded"] += 1
        return "disk"

    def _slots(self, block_id: int) -> range:
        size = self._executor.block_size
        return range(block_id * size, block_id * size + size)

    def _run_what_is_queued(self) -> None:
        """A copy is behind the steps in flight, as on the stream of a device."""
        self._before_copy()
        if isinstance(self._executor, QueueingExecutor):
            while self._executor._queue:
                self._executor._run_next(self._executor._queue.popleft())
