"""A tier's threads may hang in the file system: nobody waits for them for long."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.library import LLM
from engine.messages import SamplingParams
from gpu.executor import UniProcExecutor
from gpu.kv_tiers.chunks import HostMemory
from gpu.kv_tiers.tier import NUM_BUFFERS, KVTier

NAME = b"n" * 16


class HangingStore:
    """It has everything, and gives it when it is let go."""

    name, num_bytes = "disk", 0

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_loads = 0
        self.has_got_on = False  # by itself, after a minute

    def find(self, name: bytes) -> bool:
        return True

    def load(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        self.num_loads += 1
        self.has_got_on |= not self.go_on.wait(60)
        return True

    def store(self, name: bytes, payload: NDArray[np.uint8]) -> bool:
        self.has_got_on |= not self.go_on.wait(60)
        return True

    def touch(self, name: bytes) -> None: ...
    def discard(self, name: bytes) -> None: ...
    def refresh(self) -> None: ...


def hanging_tier() -> tuple[KVTier, HangingStore]:
    store = HangingStore()
    memory = HostMemory([np.zeros((32, 16), np.uint8)])
    return KVTier(memory, b"k" * 32, 1, 16, lambda: [store]), store


def test_an_end_does_not_wait_for_what_hangs() -> None:
    tier, store = hanging_tier()
    tier.load([NAME] * 20, [[block] for block in range(20)])
    tier.store(NAME, [30])
    tier.close()
    assert not store.has_got_on, "everything was still hanging when the end was over"
    store.go_on.set()


def test_a_process_ends_though_a_load_hangs() -> None:
    code = """
        from tests.gpu.kv_tiers.test_tier_threads import NAME, hanging_tier

        tier, store = hanging_tier()
        tier.load([NAME], [[0]])
        while not store.num_loads: ...
        print("loading", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout == "loading\n"


def test_what_was_cancelled_is_not_read() -> None:
    tier, store = hanging_tier()
    tier.cancel(tier.load([NAME] * NUM_BUFFERS, [[block] for block in range(NUM_BUFFERS)]))
    store.go_on.set()
    ticket = tier.load([NAME], [[9]])
    found: list[tuple[int, int, str | None]] = []
    while not found:
        found = tier.poll(0.1)
    assert found == [(ticket, 0, "disk")]
    assert store.num_loads <= 3, "what two threads had begun, and what is wanted"
    tier.close()


class ForgetfulMemory(HostMemory):
    """Has no memory for the first buffers."""

    refusals = NUM_BUFFERS

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        if self.refusals:
            self.refusals -= 1
            raise MemoryError
        return super().buffer(num_bytes)


def test_readers_go_on_where_there_was_no_memory_for_a_buffer() -> None:
    store = HangingStore()
    store.go_on.set()
    tier = KVTier(ForgetfulMemory([np.zeros((32, 16), np.uint8)]), b"k" * 32, 1, 16, lambda: [store])
    found: dict[int, str | None] = {}
    ticket = tier.load([NAME] * 20, [[block] for block in range(20)])
    while len(found) < 20:
        tier.wait()
        found |= {index: source for at, index, source in tier.poll(0.1) if at == ticket}
    assert sorted(found.values(), key=str) == [None] * NUM_BUFFERS + ["disk"] * (20 - NUM_BUFFERS)
    tier.close()


def test_no_buffer_is_lost_where_there_was_no_memory_for_it() -> None:
    store = HangingStore()
    store.go_on.set()
    tier = KVTier(ForgetfulMemory([np.zeros((32, 16), np.uint8)]), b"k" * 32, 1, 16, lambda: [store])
    for _ in range(NUM_BUFFERS):
        with pytest.raises(MemoryError):
            tier.store(NAME, [1])
    assert not tier.is_storing
    assert tier.store(NAME, [1])
    tier.close()


@pytest.mark.slow
def test_a_library_that_is_dropped_keeps_neither_threads_nor_buffers(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(progress=False, max_model_len=256, kv_cache_memory="32MiB", kv_cache_dir=tmp_path)
    llm.generate("The sea is", SamplingParams(max_tokens=2), progress=False)
    executor = llm.core.executor
    assert isinstance(executor, UniProcExecutor)
    assert executor.tier is not None
    tier = weakref.ref(executor.tier)
    assert "kv-tier" in {thread.name for thread in set(threading.enumerate()) - before}
    del executor
    del llm
    gc.collect()
    assert tier() is None
    assert not [thread.name for thread in set(threading.enumerate()) - before if "kv-tier" in thread.name]
