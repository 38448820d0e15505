"""The barrier of gpu/cpu/csrc/ranks.h with more ranks than cores, and fewer: native/ranks_stress.cpp says what."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.gpu.native_builds import NATIVE, build, busy_neighbour, dawdling, stress

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is for x86")

STRESS = NATIVE / "ranks_stress.cpp"


@pytest.mark.slow
def test_no_rank_leaves_before_all_have_come_or_waits_for_a_lost_one(tmp_path: Path):
    program = build(tmp_path, STRESS, "-O2")
    with busy_neighbour():
        for ranks in (2, 5):
            assert stress(program, ranks, seconds=1.5) > 100


@pytest.mark.slow
def test_no_two_ranks_race(tmp_path: Path):
    assert stress(build(tmp_path, STRESS, "-O1", "-g", "-fsanitize=thread"), 3, seconds=1.5) > 100


@pytest.mark.slow
def test_ranks_touch_no_memory_but_their_own(tmp_path: Path):
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert stress(build(tmp_path, STRESS, *flags), 3, seconds=1.5) > 100


@pytest.mark.storm
def test_ranks_meet_however_long_anybody_takes_for_minutes(tmp_path: Path):
    program = dawdling(tmp_path, STRESS)
    with busy_neighbour():
        assert stress(program, 3, seconds=120) > 1_000
