"""How much is kept beside the KV cache and what goes first, and the way between that and the blocks of a device."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import ConfigError
from gpu.device import tables
from gpu.kv_tiers.chunks import HEADER_BYTES, HostMemory, Signer, TorchMemory
from gpu.kv_tiers.opening import check_tiers
from gpu.kv_tiers.stores import DiskStore, RamStore
from gpu.kv_tiers.tier import MEASURE_AGAIN, KVTier
from gpu.runner.runner import WorkerOptions
from tests.gpu.kv_stores import SECRET, SIZE, SPACES, file_of, is_right, loaded, name, open_store, payload


def test_the_directory_keeps_to_its_size_and_evicts_the_least_recently_used_over_restarts(
    tmp_path: Path,
) -> None:
    limit = 50 * (SIZE + HEADER_BYTES)
    store = open_store(tmp_path, max_chunks=50)
    for number in range(300):
        if number >= 20:
            assert all(is_right(store, used) for used in range(20))
        if number % 100 == 99:
            store = open_store(tmp_path, max_chunks=50)
        store.store(name(number), payload(number))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= limit
    kept = [number for number in range(300) if store.find(name(number))]
    assert kept == [*range(20), *range(300 - len(kept) + 20, 300)]
    for number in range(300, 360):  # what is not used any more goes
        store.store(name(number), payload(number))
    assert not any(store.find(name(number)) for number in range(20))


def test_the_host_memory_evicts_the_least_recently_used() -> None:
    draw, store = random.Random(0), RamStore(20 * SIZE)
    model: list[int] = []  # the least recently used first
    for _ in range(1000):
        number = draw.randrange(40)
        if draw.random() < 0.5:
            assert (loaded(store, number) is not None) == (number in model)
            used = number in model
        else:
            assert store.store(name(number), payload(number))
            used = number not in model
        if used:
            model = [*(each for each in model if each != number), number][-20:]
        assert [each for each in range(40) if store.find(name(each))] == sorted(model)


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_the_end_of_a_prefix_is_evicted_before_its_beginning(kind: str, tmp_path: Path) -> None:
    """Without its first chunk no other chunk of a prefix can be loaded."""
    memory = HostMemory([np.zeros((4, SIZE), np.uint8)])
    store = open_store(tmp_path, max_chunks=40) if kind == "disk" else RamStore(40 * SIZE)
    tier = KVTier(memory, b"", 1, SIZE, lambda: [store])
    for prompt in range(2):  # together they have more chunks than there is room for
        names = [name(100 * prompt + number) for number in range(30)]
        for each in names:
            while not tier.store(each, [0]):
                tier.wait()
        tier.touch(names)
    tier.close()
    for prompt, least in ((0, 5), (1, 30)):
        kept = [number for number in range(30) if store.find(name(100 * prompt + number))]
        assert kept == list(range(len(kept)))
        assert len(kept) >= least


def test_a_chunk_that_is_dated_in_the_future_goes_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_chunks=4)
    for number in range(4):
        store.store(name(number), payload(number))
    tomorrow = time.time() + 86400.0
    os.utime(file_of(tmp_path, 3), (tomorrow, tomorrow))
    store.store(name(4), payload(4))
    assert not store.find(name(3))
    assert is_right(store, 4)


def test_the_limit_is_that_of_the_directory_whatever_is_kept_there_by_whom(tmp_path: Path) -> None:
    now = [0.0]
    limit = 20 * (SIZE + HEADER_BYTES)
    stores = [DiskStore(tmp_path, Signer(SECRET, space, SIZE), limit, clock=lambda: now[0]) for space in SPACES]
    for number in range(60):
        now[0] += 3600.0  # a look every so often
        for store in stores:
            store.refresh()
            assert store.store(name(number), payload(number))
            assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= limit
    stores[0].refresh()
    now[0] += 3600.0
    stores[0].refresh()
    assert stores[0].num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))


def test_what_is_forgotten_takes_no_room(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(4):
        store.store(name(number), payload(number))
    store.discard(name(0))
    store.discard(name(0))
    file_of(tmp_path, 1).unlink()
    file_of(tmp_path, 2).write_bytes(b"torn")
    assert loaded(store, 1) is loaded(store, 2) is None
    assert store.num_bytes == SIZE + HEADER_BYTES


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(20):
        store.store(name(number), payload(number))
    store = open_store(tmp_path, max_chunks=10)
    assert 0 < store.num_bytes <= 10 * (SIZE + HEADER_BYTES)
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))


def test_the_chunks_of_a_namespace_that_no_engine_uses_go_first(tmp_path: Path) -> None:
    old = open_store(tmp_path, space=SPACES[0])
    for number in range(10):
        old.store(name(number), payload(number))
    new = open_store(tmp_path, space=SPACES[1], max_chunks=12)
    for number in range(20, 30):
        assert new.store(name(number), payload(number))
    assert all(is_right(new, number) for number in range(20, 30))


def test_what_is_larger_than_the_limit_pushes_nobody_out(tmp_path: Path) -> None:
    for small, large in (
        (open_store(tmp_path), DiskStore(tmp_path, Signer(SECRET, b"m" * 16, 5 * SIZE), 4 * SIZE)),
        (ram := RamStore(4 * SIZE), ram),
    ):
        assert all(small.store(name(number), payload(number)) for number in range(3))
        assert not large.store(name(9), payload(9, 5 * SIZE))
        assert all(is_right(small, number) for number in range(3))


def test_the_host_memory_gives_back_what_it_was_given_and_keeps_to_its_size() -> None:
    store = RamStore(10 * SIZE)
    for number in range(30):
        store.store(name(number), payload(number))
        assert store.num_bytes <= 10 * SIZE
        assert is_right(store, number)
    store.discard(name(29))
    assert loaded(store, 29) is None


def host_memory() -> HostMemory:
    return HostMemory([np.arange(7 * 48, dtype=np.uint16).reshape(7, 2, 24) + layer for layer in range(3)])


def torch_memory() -> TorchMemory:
    return TorchMemory([torch.randn(7, 4, 2, 3, 8).to(torch.bfloat16) for _ in range(3)])


@pytest.mark.parametrize("make", [host_memory, torch_memory])
def test_blocks_come_back_as_they_were(make: Callable[[], HostMemory | TorchMemory]) -> None:
    memory = make()
    size = 3 * memory.block_bytes
    first, second = memory.buffer(size), memory.buffer(size)
    memory.copy_out([5, 0, 3], first)()
    memory.copy_in([1, 2, 6], first)()
    memory.copy_out([1, 2, 6], second)()
    assert np.array_equal(first, second)
    memory.copy_out([5, 0, 3], second)()
    assert np.array_equal(first, second)
    assert len({bytes(first[start : start + 16]) for start in range(0, size, 16)}) > 1


def test_memory_of_the_host_is_refused_where_the_device_computes_in_it() -> None:
    with pytest.raises(ConfigError, match="kv_cache_ram"):
        check_tiers(WorkerOptions(kv_cache_ram=2**20), "cpu")
    check_tiers(WorkerOptions(kv_cache_ram=2**20), "cuda")


def test_more_memory_of_the_host_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_ram.*works"):
        check_tiers(WorkerOptions(kv_cache_ram=2**50), "cuda")


def test_a_load_that_stood_behind_other_work_does_not_end_storing() -> None:
    now = 0.0
    tier = KVTier(host_memory(), SECRET, 1, 144, list, clock=lambda: now)
    try:
        assert tier.is_cheaper(0.001), "nothing was measured"
        tier._load_seconds.extend([0.5, *[0.005] * 14])
        assert tier.is_cheaper(0.03)
        assert not any(tier.is_cheaper(0.004) for _ in range(200))
        assert tier.is_cheaper(0.0), "what computing takes is unknown"
        now += MEASURE_AGAIN + 1
        assert tier.is_cheaper(0.004), "nobody would ever measure again"
    finally:
        tier.close()


def test_a_folder_in_place_of_a_chunk_keeps_nobody_from_making_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_chunks=4)
    store.store(name(1), payload(1))
    file_of(tmp_path, 1).with_name(f"{name(99).hex()}.kv").mkdir()
    assert all(store.store(name(number), payload(number)) for number in range(2, 12))


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_chunk_that_is_no_file_is_missing_and_takes_no_room(kind: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(2):
        store.store(name(number), payload(number))
    path = file_of(tmp_path, 0)
    path.unlink()
    make = {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(file_of(tmp_path, 1)),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    store = open_store(tmp_path)
    assert not store.find(name(0))
    assert store.num_bytes == SIZE + HEADER_BYTES
    assert store.store(name(0), payload(0)) == (kind != "folder")
    assert is_right(store, 0) == (kind != "folder")
    assert store.store(name(2), payload(2)), "a folder in the place of one chunk keeps others from being stored"


def test_a_file_larger_than_the_limit_goes_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_chunks=4)
    for number in range(3):
        store.store(name(number), payload(number))
    with file_of(tmp_path, 0).with_name(f"{name(99).hex()}.kv").open("wb") as huge:
        huge.truncate(2**40)
    store = open_store(tmp_path, max_chunks=4)
    assert all(is_right(store, number) for number in range(3))
    assert not store.find(name(99))


class Stalls(TorchDispatchMode):
    """Notes copies to a device from memory of the host that is not pinned: on a card they wait for all steps in flight.
    What leaves a meta device is not copied, since it holds nothing."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned
        self.found: list[str] = []
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0]
        result = func(*args, **(kwargs or {}))
        source = args[1] if name == "copy_" else args[0] if name in ("to", "_to_copy") else None
        if source is not None and result.is_meta and not source.is_meta:
            self.num_copies += 1
            if source.data_ptr() not in self._pinned:
                self.found.append(name)
        return result


def test_copies_to_and_from_a_card_wait_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()
    make = tables.host_tensor

    def host_tensor(*given: Any) -> torch.Tensor:
        tensor = make(*given)
        pinned.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(tables, "host_tensor", host_tensor)
    memory = TorchMemory([torch.empty(7, 4, 2, 3, 8, dtype=torch.bfloat16, device="meta") for _ in range(3)])
    data = memory.buffer(3 * memory.block_bytes)
    pinned.add(data.ctypes.data)  # as `buffer` has it where there is a card
    with Stalls(pinned) as stalls:
        memory.copy_out([5, 0, 3], data)()
        memory.copy_in([1, -1, 6], data)()
    assert stalls.found == []
    assert stalls.num_copies == 4  # the blocks' numbers, twice; which of them are wanted; and the blocks


def test_a_link_in_place_of_a_namespace_is_not_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "kv"
    for each in (elsewhere, folder):
        each.mkdir()
    (elsewhere / f"{name(7).hex()}.kv").write_bytes(b"another's")
    (folder / (b"n" * 16).hex()).symlink_to(elsewhere)
    before = {path.name: path.stat().st_mtime_ns for path in elsewhere.iterdir()}
    store = open_store(folder)
    assert not store.store(name(1), payload(1))
    assert loaded(store, 7) is None
    store.discard(name(7))
    store.refresh()
    assert {path.name: path.stat().st_mtime_ns for path in elsewhere.iterdir()} == before


def test_foreign_files_in_a_namespace_are_left_alone_and_opened_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, max_chunks=4)
    store.store(name(1), payload(1))
    namespace = file_of(tmp_path, 1).parent
    foreign = [namespace / f"{number}.{kind}" for number in range(200) for kind in ("tmp", "txt", "kv")]
    for path in foreign:
        path.touch()
    left = namespace / f"{name(9).hex()}.99999.99999.tmp"  # of a writer that died
    left.touch()
    opened: list[str] = []

    def remove(path: str) -> None:
        opened.append(path)
        os.unlink(path)

    monkeypatch.setattr("gpu.kv_tiers.stores._remove_if_left", remove)
    store = open_store(tmp_path, max_chunks=4)
    assert all(store.store(name(number), payload(number)) for number in range(2, 12))
    assert opened == [str(left)]
    assert all(path.exists() for path in foreign)
