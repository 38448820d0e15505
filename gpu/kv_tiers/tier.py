"""Threads that store and load chunks while steps run: the `engine.executor.BlockTier` of a device.

Only the engine's thread touches the KV cache, between steps: it copies chunks to and from buffers, so any block may be
reused at any time, and a request aborted during a load needs no cleanup. Other threads do file I/O and checksums.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import TierStats
from gpu.kv_tiers.chunks import KVMemory, nothing_to_wait_for

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20  # approximate size of a chunk
NUM_BUFFERS = 8  # for storing, and as many for loading
READERS = 2  # threads
LOOK_AROUND = 1.0  # seconds between two looks for chunks that other engines have stored
WAIT_SECONDS = 0.005  # an idle engine waits this long before it checks its inbox again
OPENING_SECONDS = 2.0  # a start waits this long for the stores, so that the first request finds its chunks
MEASURES = 16  # approximate number of measurements in an average
MEASURE_AGAIN = 60.0  # seconds after which measured load times expire
CLOSING_SECONDS = 2.0  # closing waits this long for the threads: a file system may never answer


class BlockStore(Protocol):
    """A store of chunks by their names. `find` never waits; a chunk that `load` cannot read is a miss."""

    name: str

    @property
    def num_bytes(self) -> int: ...
    def find(self, name: bytes) -> bool: ...
    def load(self, name: bytes, into: NDArray[np.uint8]) -> bool: ...
    def store(self, name: bytes, payload: NDArray[np.uint8]) -> bool: ...
    def touch(self, name: bytes) -> None: ...
    def discard(self, name: bytes) -> None: ...
    def refresh(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A chunk to load, and the blocks to copy it to."""

    ticket: int
    index: int
    name: bytes
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk that was read, and the name of its store; None: no store had it."""

    wanted: _Wanted
    buffer: NDArray[np.uint8] | None  # None: no memory for it
    store: str | None
    seconds: float


class KVTier:
    """The stores, fastest first, and the threads that use them. Only the engine's thread calls its methods."""

    def __init__(
        self,
        memory: KVMemory,
        key: bytes,
        blocks_per_chunk: int,
        payload_bytes: int,
        open_stores: Callable[[], Sequence[BlockStore]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_stores` runs on a thread, since it may take long; until it has returned, no chunk is found."""
        self.key = key
        self.blocks_per_chunk = blocks_per_chunk
        self.payload_bytes = payload_bytes
        self.store_seconds = 0.0  # approximate processor time that storing a chunk takes from the steps
        self._load_seconds: deque[float] = deque(maxlen=MEASURES)  # of the latest chunks
        self._measured_at = 0.0
        self._memory = memory
        self._clock = clock
        self._stores: Sequence[BlockStore] = ()
        self._copy_seconds = 0.0
        self._num_tickets = 0
        self._lock = threading.Lock()  # guards the counts
        self._counts: dict[str, TierStats] = {}
        self._news = threading.Event()  # a chunk has been read, or a buffer is free again
        self._free: deque[NDArray[np.uint8] | None] = deque([None] * NUM_BUFFERS)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wanted: deque[_Wanted] = deque()
        self._arrived: deque[_Read] = deque()
        self._living: set[int] = set()  # tickets of loads that are not cancelled
        self._spare: deque[tuple[NDArray[np.uint8] | None, Callable[[], None]]] = deque(
            [(None, nothing_to_wait_for)] * NUM_BUFFERS
        )
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._opened = threading.Event()
        self._threads = [threading.Thread(target=self._write_behind, args=(open_stores,), name="kv-tier", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read_ahead, name="kv-tier-load", daemon=True) for _ in range(READERS)
        ]
        for thread in self._threads:
            thread.start()
        self._opened.wait(OPENING_SECONDS)

    def find(self, name: bytes) -> bool:
        """Return True if this chunk can probably be loaded."""
        return any(store.find(name) for store in self._stores)

    def is_cheaper(self, seconds: float) -> bool:
        """Return True if loading a chunk is cheaper than computing it in `seconds`, or if either was not measured.

        The median of load times is compared, since a single load may have waited for other work. It expires, because no
        load is measured while loading seems too expensive.
        """
        if seconds == 0.0 or not self._load_seconds:
            return True
        return self._clock() - self._measured_at > MEASURE_AGAIN or median(self._load_seconds) < seconds

    def load(self, names: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> int:
        """Start loading each chunk into its blocks, and return the load's ticket. The caller must keep the blocks until
        all chunks were polled or the load was cancelled."""
        self._num_tickets += 1
        self._living.add(self._num_tickets)
        self._wanted += (
            _Wanted(self._num_tickets, index, name, ids)
            for index, (name, ids) in enumerate(zip(names, block_ids, strict=True))
        )
        self._read_on()
        return self._num_tickets

    def cancel(self, ticket: int) -> None:
        """Cancel a load: none of its chunks is copied from now on."""
        self._living.discard(ticket)
        self._wanted = deque(wanted for wanted in self._wanted if wanted.ticket != ticket)

    def poll(self, seconds: float) -> list[tuple[int, int, str | None]]:
        """Copy chunks already read into their blocks, for about `seconds`. Return ticket and index of each finished
        chunk, with the name of its store, or None if it could not be loaded."""
        found: list[tuple[int, int, str | None]] = []
        end = time.perf_counter() + seconds
        while self._arrived and time.perf_counter() < end:
            read = self._arrived.popleft()
            wait = nothing_to_wait_for
            if read.wanted.ticket in self._living:
                if read.store is not None and read.buffer is not None:
                    began = time.perf_counter()
                    wait = self._memory.copy_in(read.wanted.block_ids, read.buffer)
                    took = time.perf_counter() - began
                    self._load_seconds.append(took + read.seconds / READERS)
                    self._measured_at = self._clock()
                    self._count(read.store, loaded_bytes=len(read.buffer), load_seconds=took + read.seconds)
                found.append((read.wanted.ticket, read.wanted.index, read.store))
            self._spare.append((read.buffer, wait))
        self._read_on()
        return found

    def store(self, name: bytes, block_ids: Sequence[int]) -> bool:
        """Copy a chunk out of the KV cache, for a thread to store. Return False if all buffers are in use."""
        if not self._free:
            return False
        buffer = self._free.popleft()
        began = time.perf_counter()
        try:
            if buffer is None:
                buffer = self._memory.buffer(self.payload_bytes)
            wait = self._memory.copy_out(block_ids, buffer)
        except BaseException:
            self._free.append(buffer)
            raise
        self._copy_seconds = _average(self._copy_seconds, time.perf_counter() - began)
        self._tasks.put(partial(self._store, name, buffer, wait))
        return True

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark the chunks of a prefix as used, the first chunk last: a prefix is evicted from its end, because later
        chunks cannot be loaded without earlier ones."""
        self._tasks.put(partial(self._touch, names))

    def discard(self, names: Iterable[bytes]) -> None:
        """Delete these chunks, also those still being stored: their contents cannot be trusted."""
        wrong = list(names)
        self._discard(wrong)
        self._tasks.put(partial(self._discard, wrong))

    def wait(self) -> None:
        """Wait up to `WAIT_SECONDS` for a chunk or a free buffer, if there is nothing to poll yet."""
        if not self._arrived:
            self._news.wait(WAIT_SECONDS)
        self._news.clear()

    @property
    def is_storing(self) -> bool:
        """Return True while chunks are being stored."""
        return len(self._free) < NUM_BUFFERS

    @property
    def has_news(self) -> bool:
        return bool(self._counts)

    def take_stats(self) -> list[TierStats] | None:
        """Return the stats of each store since the last call; None if nothing happened."""
        if not self._counts:
            return None
        with self._lock:
            counts, self._counts = self._counts, {}
        for store in self._stores:
            if store.name in counts:
                counts[store.name].num_bytes = store.num_bytes
        return list(counts.values())

    def close(self) -> None:
        """Store the chunks that were copied, and end the threads; threads that hang end with the process."""
        self._living.clear()
        self._wanted.clear()
        self._tasks.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        end = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _touch(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            for store in self._stores:
                store.touch(name)

    def _discard(self, names: Sequence[bytes]) -> None:
        for store in self._stores:
            for name in names:
                store.discard(name)

    # --- on the threads

    def _read_on(self) -> None:
        while self._wanted and self._spare:
            buffer, wait = self._spare.popleft()
            self._reads.put(partial(self._read, self._wanted.popleft(), buffer, wait))

    def _read_ahead(self) -> None:
        while (read := self._reads.get()) is not None:
            read()

    def _read(self, wanted: _Wanted, buffer: NDArray[np.uint8] | None, wait: Callable[[], None]) -> None:
        began = time.perf_counter()
        found = None
        try:
            wait()
            if buffer is None:
                buffer = self._memory.buffer(self.payload_bytes)
            for store in self._stores:
                if wanted.ticket in self._living and store.find(wanted.name):
                    if store.load(wanted.name, buffer):
                        found = store.name
                        break
                    self._count(store.name, failed_loads=1)
        except Exception:
            logger.exception("a chunk of the KV cache could not be loaded; its tokens are computed")
        self._arrived.append(_Read(wanted, buffer, found, time.perf_counter() - began))
        self._news.set()

    def _write_behind(self, open_stores: Callable[[], Sequence[BlockStore]]) -> None:
        try:
            self._stores = open_stores()
        except Exception as error:
            logger.warning("no KV blocks are stored: %s", error)
        sizes = [-1 for store in self._stores]
        self._note_sizes(sizes)
        self._opened.set()
        while True:
            try:
                task = self._tasks.get(timeout=LOOK_AROUND)
            except queue.Empty:
                task = nothing_to_wait_for
            if task is None:
                return
            try:
                task()
                for store in self._stores:
                    store.refresh()
                self._note_sizes(sizes)
            except Exception:
                logger.exception("a chunk of the KV cache could not be stored")

    def _store(self, name: bytes, buffer: NDArray[np.uint8], wait: Callable[[], None]) -> None:
        try:
            wait()
            began, cpu_began = time.perf_counter(), time.thread_time()
            for store in self._stores:
                if store.store(name, buffer):
                    took = time.perf_counter() - began
                    self._count(store.name, stored_bytes=self.payload_bytes, store_seconds=took)
            # Half of this thread's time, because the steps run on several cores and it takes only one of them.
            took = self._copy_seconds + (time.thread_time() - cpu_began) / 2
            self.store_seconds = _average(self.store_seconds, took)
        finally:
            self._free.append(buffer)
            self._news.set()

    def _note_sizes(self, known: list[int]) -> None:
        """Make `take_stats` report each store with a size that differs from `known`, and update `known`."""
        for index, store in enumerate(self._stores):
            if store.num_bytes != known[index]:
                known[index] = store.num_bytes
                self._count(store.name)

    def _count(self, store: str, **amounts: float) -> None:
        with self._lock:
            stats = self._counts.setdefault(store, TierStats(tier=store))
            for field, amount in amounts.items():
                setattr(stats, field, getattr(stats, field) + amount)


def _average(before: float, measured: float) -> float:
    return measured if before == 0.0 else before + (measured - before) / MEASURES
