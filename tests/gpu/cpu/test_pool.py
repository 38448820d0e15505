"""The threads of gpu/cpu/csrc/pool.h, more of them than cores, and fewer: native/pool_stress.cpp says what."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.gpu.native_builds import NATIVE, build, busy_neighbour, dawdling, run, stress

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is for x86")

STRESS = NATIVE / "pool_stress.cpp"
THREADS = 4


def plain(folder: Path, source: Path) -> Path:
    return build(folder, source, "-O2")


@pytest.mark.slow
def test_each_index_runs_once_however_long_anybody_takes(tmp_path: Path):
    assert stress(dawdling(tmp_path, STRESS), THREADS, seconds=2) > 20


@pytest.mark.slow
def test_each_index_runs_once_beside_a_busy_neighbour(tmp_path: Path):
    program = plain(tmp_path, STRESS)
    with busy_neighbour():
        assert stress(program, THREADS, seconds=3) > 100


@pytest.mark.slow
def test_no_two_threads_race(tmp_path: Path):
    assert stress(build(tmp_path, STRESS, "-O1", "-g", "-fsanitize=thread"), THREADS, seconds=3) > 100


def test_a_pool_that_finds_no_memory_for_a_thread_goes_on_with_fewer(tmp_path: Path):
    assert run(build(tmp_path, NATIVE / "pool_memory.cpp", "-O1")) > 0


@pytest.mark.storm
@pytest.mark.parametrize("program", [plain, dawdling])
def test_each_index_runs_once_for_minutes(program, tmp_path: Path):
    made = program(tmp_path, STRESS)
    with busy_neighbour():
        assert stress(made, THREADS, seconds=240) > 10_000
