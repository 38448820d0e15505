"""The whole library under the compiler's sanitizers: addresses and undefined behaviour, and races of threads."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from gpu.cpu.builds import BUILDS
from gpu.cpu.library import usable
from tests.gpu.native_builds import NATIVE, assert_tests_pass, compile_all, compile_library, link, needs_library, run

pytestmark = needs_library

RUNNABLE = [library.name for library in usable()] or [""]
ROOT = Path(__file__).parents[3]
MODEL_TESTS = [
    str(ROOT / f"tests/gpu/cpu/test_{part}.py") for part in ("decoder", "encoder", "states", "draw", "matrices")
]
# In the process that the sanitizer watches: its build of the library in the place of the installed ones.
RUN = """
import sys
from pathlib import Path
import gpu.cpu.library
gpu.cpu.library.FOLDER = Path(sys.argv[1])
import pytest
# Not captured: what a sanitizer says last would be lost with the process.
sys.exit(pytest.main(["-p", "no:cacheprovider", "--capture=no", *sys.argv[2:]]))
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "build", [RUNNABLE[0], *(pytest.param(name, marks=pytest.mark.storm) for name in RUNNABLE[1:])]
)
def test_the_model_tests_touch_no_memory_but_their_own_and_mean_something(tmp_path: Path, build: str):
    flags = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
    objects = compile_library(tmp_path, build, "-O1", "-g1", *flags)
    link(tmp_path / f"{build}{EXTENSION_SUFFIXES[0]}", objects, "-shared", *flags)
    with_ranks = compile_all(tmp_path, [NATIVE / "library_ranks.cpp"], *BUILDS[build].options, "-O1", "-g1", *flags)
    assert run(link(tmp_path / "library_ranks", [*objects, *with_ranks], *flags)) == 0
    assert_tests_pass(RUN, [str(tmp_path), *MODEL_TESTS], "libasan.so", "libubsan.so")


@pytest.mark.storm  # pool and barrier alone are watched in every run: test_pool.py, test_ranks.py
@pytest.mark.timeout(1000)
def test_threads_that_share_an_engine_take_turns_and_ranks_that_share_memory_wait_for_each_other(tmp_path: Path):
    flags = ("-O1", "-g1", "-fsanitize=thread")
    objects = compile_library(tmp_path, RUNNABLE[0], *flags)
    for source in (NATIVE / "library_threads.cpp", NATIVE / "library_ranks.cpp"):
        callers = compile_all(tmp_path, [source], *BUILDS[RUNNABLE[0]].options, *flags)
        assert run(link(tmp_path / source.stem, [*objects, *callers], *flags)) == 0
