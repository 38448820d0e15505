"""The threads of gpu/cpu/csrc/pool.h, more of them than cores, and fewer: native/pool_stress.cpp says what."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gpu.native_builds import NATIVE, compile_all, link, stress

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is for x86")

STRESS = NATIVE / "pool_stress.cpp"
THREADS = 4


@contextmanager
def busy_neighbour() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def dawdling(folder: Path) -> Path:
    """The program with a chance of delay before every access to memory."""
    watched = compile_all(folder, [STRESS], "-O1", "-fsanitize=thread")
    return link(folder / "dawdling", [*watched, *compile_all(folder, [NATIVE / "dawdle.cpp"], "-O1")])


def plain(folder: Path) -> Path:
    return link(folder / "plain", compile_all(folder, [STRESS], "-O2"))


def test_each_index_runs_once_however_long_anybody_takes(tmp_path: Path):
    assert stress(dawdling(tmp_path), THREADS, seconds=5) > 100


def test_each_index_runs_once_beside_a_busy_neighbour(tmp_path: Path):
    program = plain(tmp_path)
    with busy_neighbour():
        assert stress(program, THREADS, seconds=3) > 100


def test_no_two_threads_race(tmp_path: Path):
    flags = ("-O1", "-g", "-fsanitize=thread")
    assert stress(link(tmp_path / "watched", compile_all(tmp_path, [STRESS], *flags), *flags), THREADS, seconds=3) > 100


def test_a_pool_that_finds_no_memory_for_a_thread_goes_on_with_fewer(tmp_path: Path):
    program = link(tmp_path / "memory", compile_all(tmp_path, [NATIVE / "pool_memory.cpp"], "-O1"))
    run = subprocess.run([program], check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, (run.returncode, run.stdout + run.stderr)
    assert int(run.stdout.split()[0]) > 0


@pytest.mark.storm
@pytest.mark.parametrize("program", [plain, dawdling])
def test_each_index_runs_once_for_minutes(program, tmp_path: Path):
    made = program(tmp_path)
    with busy_neighbour():
        assert stress(made, THREADS, seconds=240) > 10_000
