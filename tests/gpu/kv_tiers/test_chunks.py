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
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu.kv_tiers.chunks import HEADER_BYTES, Checksum, Signer, read_key
from gpu.kv_tiers.stores import PAUSE, DiskStore
from tests.gpu.kv_stores import SECRET, SIZE, SPACES, file_of, is_right, loaded, name, open_store, payload

FORK = multiprocessing.get_context("fork")


def test_what_was_stored_is_found_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.find(name(1))
    assert store.store(name(1), payload(1))
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / (b"n" * 16).hex()).stat().st_mode & 0o777 == 0o700
    again = open_store(tmp_path)
    assert again.find(name(1))
    assert is_right(again, 1)
    assert loaded(again, 2) is None


def test_a_chunk_of_an_earlier_version_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1))
    path, signer = file_of(tmp_path, 1), store._signer
    content = path.read_bytes()
    fields = content[:48] + struct.pack("<d", 1.5) + content[56:72]  # it had a number where zeros are now
    path.write_bytes((fields + signer._mac(fields)).ljust(HEADER_BYTES, b"\0") + content[HEADER_BYTES:])
    assert is_right(open_store(tmp_path), 1)


@pytest.mark.parametrize(
    "place", [*range(0, HEADER_BYTES, 5), HEADER_BYTES, HEADER_BYTES + 2077, HEADER_BYTES + SIZE - 1]
)
def test_a_chunk_with_a_flipped_bit_is_a_miss_and_is_removed(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1))
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
def test_a_chunk_that_was_cut_is_a_miss(length: int, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1))
    os.truncate(file_of(tmp_path, 1), length)
    assert loaded(store, 1) is None
    assert not list(tmp_path.glob("*/*.kv"))


def test_a_chunk_under_another_name_in_another_space_or_of_another_key_is_a_miss(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path, space=b"m" * 16)
    for number in (1, 2, 3):
        store.store(name(number), payload(number))
    file_of(tmp_path, 1).rename(file_of(tmp_path, 1).with_name(f"{name(9).hex()}.kv"))
    (file_of(tmp_path, 2)).rename(tmp_path / (b"m" * 16).hex() / f"{name(2).hex()}.kv")
    assert loaded(open_store(tmp_path), 9) is None
    assert loaded(other, 2) is None
    assert loaded(open_store(tmp_path, secret=b"t" * 32), 3) is None


def test_a_chunk_is_no_link_and_no_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in (1, 2):
        store.store(name(number), payload(number))
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
def test_a_pipe_in_place_of_a_chunk_or_of_the_key_is_no_wait(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1))
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


def test_a_directory_that_is_removed_or_emptied_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    key = read_key(tmp_path / "key")
    store = DiskStore(tmp_path, Signer(SECRET, SPACES[0], SIZE), 2**30, key=key, clock=lambda: now[0])
    removals: list[Callable[[Path], object]] = [Path.exists, shutil.rmtree, empty]
    for number, remove in enumerate(removals):
        assert store.store(name(number), payload(number))
        remove(tmp_path)
        now[0] += PAUSE / 2
        store.refresh()
        assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
        assert read_key(tmp_path / "key") == key
    shutil.rmtree(tmp_path)
    assert not store.store(name(8), payload(8))
    assert store.store(name(8), payload(8))
    assert caplog.text.count("was removed or emptied, and is made again") == 3
    empty(tmp_path)
    read_key(tmp_path / "key")
    for _ in range(2):
        now[0] += 3600.0
        store.refresh()
        assert not store.store(name(9), payload(9))
    assert caplog.text.count("has another key now") == 1


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_what_torch_computes_with_is_a_namespace_of_its_own() -> None:
    program = "import torch; from gpu.kv_tiers.opening import _computed_by; print(_computed_by())"
    command = [sys.executable, "-c", program]
    said = {
        subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=True).stdout
        for more in ({}, {"ATEN_CPU_CAPABILITY": "default"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    }
    assert len(said) == 3


def test_other_engines_chunks_are_seen(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    one.store(name(1), payload(1))
    other.refresh()
    assert is_right(other, 1)
    one.discard(name(1))
    assert loaded(other, 1) is None  # gone without a word
    assert not other.find(name(1))


def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    store = DiskStore(tmp_path, Signer(SECRET, b"n" * 16, SIZE), 2**30, clock=lambda: now[0])
    store.store(name(1), payload(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        assert not store.store(name(2), payload(2))
        assert not store.store(name(3), payload(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(caplog.records) == 1
    assert f"{tmp_path} cannot be written" in caplog.text
    assert is_right(store, 1)  # what is there still serves
    assert not list(tmp_path.glob("*/*.tmp"))
    now[0] += PAUSE
    assert store.store(name(2), payload(2))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MB")
def test_a_file_system_without_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        store = open_store(tmp_path)
        stored = [store.store(name(number), payload(number)) for number in range(300)]
        assert any(stored)
        assert not all(stored)
        assert os.strerror(errno.ENOSPC) in caplog.text or "it is full" in caplog.text
        assert all(is_right(store, number) for number in range(300) if stored[number])
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        caplog.clear()
        again = open_store(tmp_path)
        assert not again.store(name(999), payload(999))
        assert "cannot be written" in caplog.text
        assert is_right(again, 0)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_key_that_others_could_read_is_refused_and_one_of_several_starts_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FORK.Pool(4) as pool:
        keys = set(pool.map(read_key, [tmp_path / "key"] * 16))
        pool.close()
        pool.join()  # the end of the block would send SIGTERM, which a fork of this process may ignore
    assert len(keys) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        read_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user"):
        read_key(tmp_path / "key")
    monkeypatch.undo()
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(OSError, match="32 bytes"):
        read_key(tmp_path / "key")


WRITER = """
import sys, random
from pathlib import Path
from tests.gpu.kv_stores import open_store, name, payload, loaded
import numpy as np
folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
store = open_store(folder, max_chunks=40)
print("ready", flush=True)
for _ in range(rounds):
    number = draw.randrange(100)
    if store.find(name(number)):
        found = loaded(store, number)
        assert found is None or np.array_equal(found, payload(number)), "wrong content"
    else:
        store.store(name(number), payload(number))
    store.refresh()
"""


def start_writer(folder: Path, seed: int, rounds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(seed), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])


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
    store = open_store(folder, max_chunks=40)
    assert not list(folder.glob("*/*.tmp"))
    found = [number for number in range(100) if store.find(name(number))]
    assert found
    for number in found:
        assert is_right(store, number)
    assert store._make_room(30 * SIZE)  # nobody holds the lock


@pytest.mark.seconds
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    kill_writers(tmp_path, 3)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_a_hundred_writers_that_are_killed_leave_nothing_wrong(tmp_path: Path) -> None:
    kill_writers(tmp_path, 100)


@pytest.mark.seconds
def test_engines_that_share_a_directory_never_read_what_is_wrong(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, seed, 400) for seed in range(3)]
    assert [writer.wait(100) for writer in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= 45 * (SIZE + HEADER_BYTES)


def test_a_process_without_descriptors_gives_up_no_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    store.store(name(1), payload(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert loaded(store, 1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be read" in caplog.text
    assert is_right(open_store(tmp_path), 1)
