"""What is kept on disk is given back bit for bit or not at all, whatever happens to files, processes and the disk."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError
from gpu.kv_tiers.disk import PAUSE, STALE, DiskStore
from gpu.kv_tiers.memory import HostMemory, TorchMemory
from gpu.kv_tiers.opening import check_tiers
from gpu.kv_tiers.piece import HEADER_BYTES, Checksum, Seal, read_key
from gpu.kv_tiers.ram import RamStore
from gpu.kv_tiers.tier import MEASURE_AGAIN, KVTier
from gpu.model_loader import WorkerOptions

SIZE = 4096 + 24
SECRET = b"s" * 32
SPACES = (b"m" * 16, b"n" * 16)
FORK = multiprocessing.get_context("fork")


def payload(number: int, size: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def open_store(folder: Path, *, max_pieces: int = 1000, secret: bytes = SECRET, space: bytes = b"n" * 16) -> DiskStore:
    return DiskStore(folder, Seal(secret, space, SIZE), max_pieces * (SIZE + HEADER_BYTES))


def loaded(store: DiskStore | RamStore, number: int) -> NDArray[np.uint8] | None:
    into = np.zeros(SIZE, np.uint8)
    return into if store.load(name(number), into) else None


def is_right(store: DiskStore | RamStore, number: int) -> bool:
    found = loaded(store, number)
    return found is not None and np.array_equal(found, payload(number))


def file_of(folder: Path, number: int) -> Path:
    return next(folder.glob(f"*/{name(number).hex()}.kv"))


def test_what_was_stored_is_found_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.find(name(1))
    assert store.store(name(1), payload(1), 1.0)
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / (b"n" * 16).hex()).stat().st_mode & 0o777 == 0o700
    again = open_store(tmp_path)
    assert again.find(name(1))
    assert is_right(again, 1)
    assert loaded(again, 2) is None


@pytest.mark.parametrize(
    "place", [*range(0, HEADER_BYTES, 5), HEADER_BYTES, HEADER_BYTES + 2077, HEADER_BYTES + SIZE - 1]
)
def test_a_piece_with_a_flipped_bit_is_a_miss_and_is_removed(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1), 1.0)
    path = file_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)
    assert loaded(store, 1) is None
    assert not path.exists()
    assert not store.find(name(1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4096, HEADER_BYTES + SIZE - 1])
def test_a_piece_that_was_cut_is_a_miss(length: int, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1), 1.0)
    os.truncate(file_of(tmp_path, 1), length)
    assert loaded(store, 1) is None
    assert not list(tmp_path.glob("*/*.kv"))


def test_a_piece_under_another_name_in_another_space_or_of_another_key_is_a_miss(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path, space=b"m" * 16)
    for number in (1, 2, 3):
        store.store(name(number), payload(number), 1.0)
    file_of(tmp_path, 1).rename(file_of(tmp_path, 1).with_name(f"{name(9).hex()}.kv"))
    (file_of(tmp_path, 2)).rename(tmp_path / (b"m" * 16).hex() / f"{name(2).hex()}.kv")
    assert loaded(open_store(tmp_path), 9) is None
    assert loaded(other, 2) is None
    assert loaded(open_store(tmp_path, secret=b"t" * 32), 3) is None


def test_a_piece_is_no_link_and_no_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in (1, 2):
        store.store(name(number), payload(number), 1.0)
    path = file_of(tmp_path, 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert loaded(store, 1) is None
    assert (tmp_path / "elsewhere").exists()
    path = file_of(tmp_path, 2)
    path.unlink()
    path.mkdir()
    assert loaded(store, 2) is None


@pytest.mark.timeout(10)
def test_a_pipe_in_place_of_a_piece_or_of_the_key_is_no_wait(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1), 1.0)
    path = file_of(tmp_path, 1)
    for pipe in (path, tmp_path / "key"):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
    assert loaded(store, 1) is None
    assert not path.exists()
    with pytest.raises(OSError, match="32 bytes"):
        read_key(tmp_path / "key")


def test_every_change_of_a_word_and_most_others_change_the_checksum() -> None:
    checksum = Checksum(SECRET, SIZE)
    draw = random.Random(0)
    for size in (0, 1, 3, 4, 7, 8, 11, 12, 64, SIZE - 24, SIZE - 1, SIZE):
        data = payload(3, size)
        seen = {checksum.of(data)}
        for bit in [draw.randrange(size * 8) for _ in range(100 if size else 0)]:
            data[bit // 8] ^= 1 << bit % 8
            seen.add(checksum.of(data))
            data[bit // 8] ^= 1 << bit % 8
        assert len(seen) > (50 if size > 20 else size * 4)
    data = payload(4)
    base = checksum.of(data)
    for bit in (63, 62, 31, 0):  # the same bit of two words, where sums of products are weakest
        words = data.copy().view(np.uint64)
        words[[5, 77]] ^= np.uint64(1 << bit)
        assert checksum.of(words.view(np.uint8)) != base
    assert checksum.of(np.roll(data, 8)) != base
    assert checksum.of(np.concatenate([data[16:32], data[:16], data[32:]])) != base


def test_the_directory_keeps_to_its_size_and_a_scan_does_not_push_out_what_is_used(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_pieces=50)
    for number in range(20):
        store.store(name(number), payload(number), 1.0)
    for _ in range(3):
        assert all(loaded(store, number) is not None for number in range(20))
    for number in range(100, 190):  # passes through once
        store.store(name(number), payload(number), 1.0)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= 50 * (SIZE + HEADER_BYTES)
    assert all(store.find(name(number)) for number in range(20))
    store = open_store(tmp_path, max_pieces=50)  # ranks outlive a restart
    for number in range(200, 220):
        store.store(name(number), payload(number), 1.0)
    assert all(store.find(name(number)) for number in range(20))
    for number in range(300, 800):  # but nothing is kept for ever
        store.store(name(number), payload(number), 1.0)
    assert not any(store.find(name(number)) for number in range(20))


def test_what_is_worth_more_is_kept_for_longer(tmp_path: Path) -> None:
    for store in (open_store(tmp_path, max_pieces=20), RamStore(20 * SIZE)):
        for number in range(40):
            store.store(name(number), payload(number), 4.0 if number % 2 else 1.0)
        kept = [number for number in range(30) if store.find(name(number))]
        assert kept
        assert all(number % 2 for number in kept)


def test_the_limit_is_that_of_the_directory_whatever_is_kept_there_by_whom(tmp_path: Path) -> None:
    now = [0.0]
    limit = 20 * (SIZE + HEADER_BYTES)
    stores = [DiskStore(tmp_path, Seal(SECRET, space, SIZE), limit, clock=lambda: now[0]) for space in SPACES]
    for number in range(60):
        now[0] += 3600.0  # a look every so often
        for store in stores:
            store.refresh()
            assert store.store(name(number), payload(number), 1.0)
            assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= limit
    stores[0].refresh()
    now[0] += 3600.0
    stores[0].refresh()
    assert stores[0].num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))


def test_what_is_forgotten_takes_no_room(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(4):
        store.store(name(number), payload(number), 1.0)
    store.discard(name(0))
    store.discard(name(0))
    file_of(tmp_path, 1).unlink()
    file_of(tmp_path, 2).write_bytes(b"torn")
    assert loaded(store, 1) is loaded(store, 2) is None
    assert store.num_bytes == SIZE + HEADER_BYTES


def test_a_copy_that_is_dated_today_does_not_outrank_what_is_used(tmp_path: Path) -> None:
    for number in range(8):
        open_store(tmp_path).store(name(number), payload(number), 1.0)
    for number in range(4):
        os.utime(file_of(tmp_path, number))
    store = open_store(tmp_path, max_pieces=8)
    assert store.store(name(8), payload(8), 1.0)
    assert all(is_right(store, number) for number in range(4, 9))


def test_a_directory_that_is_removed_or_emptied_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    key = read_key(tmp_path / "key")
    store = DiskStore(tmp_path, Seal(SECRET, SPACES[0], SIZE), 2**30, key=key, clock=lambda: now[0])
    removals: list[Callable[[Path], object]] = [Path.exists, shutil.rmtree, empty]
    for number, remove in enumerate(removals):
        assert store.store(name(number), payload(number), 1.0)
        remove(tmp_path)
        now[0] += PAUSE / 2
        store.refresh()
        assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
        assert read_key(tmp_path / "key") == key
    shutil.rmtree(tmp_path)
    assert not store.store(name(8), payload(8), 1.0)
    assert store.store(name(8), payload(8), 1.0)
    assert caplog.text.count("was removed or emptied, and is made again") == 3
    empty(tmp_path)
    read_key(tmp_path / "key")
    for _ in range(2):
        now[0] += 3600.0
        store.refresh()
        assert not store.store(name(9), payload(9), 1.0)
    assert caplog.text.count("has another key now") == 1


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_load_lowers_no_rank(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1), 1.0)
    for _ in range(6):
        assert is_right(store, 1)
    rank = file_of(tmp_path, 1).stat().st_mtime
    assert is_right(open_store(tmp_path), 1)
    assert file_of(tmp_path, 1).stat().st_mtime == rank


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(20):
        store.store(name(number), payload(number), 1.0)
    store = open_store(tmp_path, max_pieces=10)
    assert 0 < store.num_bytes <= 10 * (SIZE + HEADER_BYTES)
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))


def test_what_no_engine_has_used_for_a_day_goes_first(tmp_path: Path) -> None:
    old = open_store(tmp_path, space=SPACES[0])
    for number in range(10):
        old.store(name(number), payload(number), 9.0)
    yesterday = time.time() - STALE
    os.utime(tmp_path / SPACES[0].hex() / "used", (yesterday, yesterday))
    new = open_store(tmp_path, space=SPACES[1], max_pieces=12)
    for number in range(20, 30):
        assert new.store(name(number), payload(number), 1.0)
    assert all(is_right(new, number) for number in range(20, 30))


def test_what_torch_computes_with_is_a_namespace_of_its_own() -> None:
    program = "import torch; from gpu.kv_tiers.opening import _computed_by; print(_computed_by())"
    command = [sys.executable, "-c", program]
    said = {
        subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=True).stdout
        for more in ({}, {"ATEN_CPU_CAPABILITY": "default"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    }
    assert len(said) == 3


def test_what_is_larger_than_the_limit_pushes_nobody_out(tmp_path: Path) -> None:
    for small, large in (
        (open_store(tmp_path), DiskStore(tmp_path, Seal(SECRET, b"m" * 16, 5 * SIZE), 4 * SIZE)),
        (ram := RamStore(4 * SIZE), ram),
    ):
        assert all(small.store(name(number), payload(number), 1.0) for number in range(3))
        assert not large.store(name(9), payload(9, 5 * SIZE), 9.0)
        assert all(is_right(small, number) for number in range(3))


def test_the_host_memory_gives_back_what_it_was_given_and_keeps_to_its_size() -> None:
    store = RamStore(10 * SIZE)
    for number in range(30):
        store.store(name(number), payload(number), 1.0)
        assert store.num_bytes <= 10 * SIZE
        assert is_right(store, number)
    store.discard(name(29))
    assert loaded(store, 29) is None


def test_other_engines_pieces_are_seen(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    one.store(name(1), payload(1), 1.0)
    other.refresh()
    assert is_right(other, 1)
    one.discard(name(1))
    assert loaded(other, 1) is None  # gone without a word
    assert not other.find(name(1))


def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    store = DiskStore(tmp_path, Seal(SECRET, b"n" * 16, SIZE), 2**30, clock=lambda: now[0])
    store.store(name(1), payload(1), 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        assert not store.store(name(2), payload(2), 1.0)
        assert not store.store(name(3), payload(3), 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(caplog.records) == 1
    assert f"{tmp_path} cannot be written" in caplog.text
    assert is_right(store, 1)  # what is there still serves
    assert not list(tmp_path.glob("*/*.tmp"))
    now[0] += PAUSE
    assert store.store(name(2), payload(2), 1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MB")
def test_a_file_system_without_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        store = open_store(tmp_path)
        stored = [store.store(name(number), payload(number), 1.0) for number in range(300)]
        assert any(stored)
        assert not all(stored)
        assert os.strerror(errno.ENOSPC) in caplog.text or "it is full" in caplog.text
        assert all(is_right(store, number) for number in range(300) if stored[number])
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        caplog.clear()
        again = open_store(tmp_path)
        assert not again.store(name(999), payload(999), 1.0)
        assert "cannot be written" in caplog.text
        assert is_right(again, 0)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_key_that_others_could_read_is_refused_and_one_of_several_starts_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FORK.Pool(4) as pool:
        keys = set(pool.map(read_key, [tmp_path / "key"] * 16))
    assert len(keys) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        read_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        read_key(tmp_path / "key")
    monkeypatch.undo()
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(OSError, match="32 bytes"):
        read_key(tmp_path / "key")


WRITER = """
import sys, random
from pathlib import Path
from tests.gpu.test_kv_tiers import open_store, name, payload, loaded
import numpy as np
folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
store = open_store(folder, max_pieces=40)
print("ready", flush=True)
for _ in range(rounds):
    number = draw.randrange(100)
    if store.find(name(number)):
        found = loaded(store, number)
        assert found is None or np.array_equal(found, payload(number)), "wrong content"
    else:
        store.store(name(number), payload(number), 1.0)
    store.refresh()
"""


def start_writer(folder: Path, seed: int, rounds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(seed), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])


def kill_writers(folder: Path, times: int) -> None:
    draw = random.Random(1)
    for seed in range(times):
        writer = start_writer(folder, seed, 10**9)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(draw.random() * 0.05)
        writer.kill()
        writer.wait()
        writer.stdout.close()
    store = open_store(folder, max_pieces=40)
    assert not list(folder.glob("*/*.tmp"))
    found = [number for number in range(100) if store.find(name(number))]
    assert found
    for number in found:
        assert is_right(store, number)
    assert store._make_room(30 * SIZE)  # nobody holds the lock


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    kill_writers(tmp_path, 3)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_a_hundred_writers_that_are_killed_leave_nothing_wrong(tmp_path: Path) -> None:
    kill_writers(tmp_path, 100)


@pytest.mark.slow
def test_engines_that_share_a_directory_never_read_what_is_wrong(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, seed, 400) for seed in range(3)]
    assert [writer.wait(100) for writer in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= 45 * (SIZE + HEADER_BYTES)


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


def test_a_process_without_descriptors_gives_up_no_piece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1), 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert loaded(store, 1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be read" in caplog.text
    assert is_right(open_store(tmp_path), 1)


def test_a_folder_in_place_of_a_piece_keeps_nobody_from_making_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_pieces=4)
    store.store(name(1), payload(1), 1.0)
    file_of(tmp_path, 1).with_name(f"{name(99).hex()}.kv").mkdir()
    assert all(store.store(name(number), payload(number), 1.0) for number in range(2, 12))


class Watched(dict[bytes, Any]):
    """Counts who of it is looked at."""

    num_seen = 0

    def items(self) -> Any:
        for item in super().items():
            self.num_seen += 1
            yield item


def test_the_host_memory_ranks_its_pieces_only_where_room_is_made() -> None:
    store = RamStore(100 * SIZE)
    store._entries = entries = Watched()
    for number in range(100):
        store.store(name(number), payload(number), 1.0)
    assert entries.num_seen == 0
    for number in range(100, 106):
        store.store(name(number), payload(number), 1.0)
    assert entries.num_seen == 100
    assert len(entries) <= 100
