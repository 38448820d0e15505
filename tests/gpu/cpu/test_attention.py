"""Attention of the library alone: native/attention_shapes.cpp, in every build that this processor runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpu.cpu.builds import BUILDS
from gpu.cpu.library import built, load_library, usable
from tests.gpu.native_builds import NATIVE, compile_all, compile_library, link, needs_library
from tests.selection import slow_except

pytestmark = needs_library
RUNNABLE = [library.name for library in usable()]


def compare(folder: Path, build: str, shapes: int, *flags: str, library: Path | None = None) -> None:
    """Raises AssertionError with what the program says of results that are not right, or not the same bits.

    They are those of an installed `library`, or of one that is compiled with `flags` as the program is.
    """
    objects = compile_all(folder, [NATIVE / "attention_shapes.cpp"], *BUILDS[build].options, *flags)
    objects += [] if library else compile_library(folder, build, *flags)
    installed = [str(library), f"-Wl,-rpath,{library.parent}"] if library else []
    program = link(folder / "attention_shapes", objects, *flags, *installed)
    run = subprocess.run([program, "1", str(shapes)], check=False, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "0 wrong\n"), run.stdout + run.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("build", slow_except(RUNNABLE, *RUNNABLE[:1]))
def test_a_row_is_right_and_the_same_bits_alone_in_a_batch_and_in_chunks(tmp_path: Path, build: str):
    compare(tmp_path, build, 10, "-O1", library=built()[build])


@pytest.mark.storm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_it_touches_no_memory_but_its_own_and_threads_do_not_race(tmp_path: Path, sanitizer: str):
    library = load_library()
    assert library is not None
    compare(tmp_path, library.name, 8, "-O1", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
