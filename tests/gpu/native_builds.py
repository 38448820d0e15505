"""C++ compiled by the tests: with the compiler that `make test` installs, for the processor that they run on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu.cpu.builds import BUILDS
from gpu.host import processor_flags

SOURCES = Path(__file__).parents[2] / "gpu/cpu/csrc"
NATIVE = Path(__file__).parent / "native"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-w", f"-I{SOURCES}"]
# What is built is run; that it was built where it can be is a test of its own.
needs_library = pytest.mark.skipif(
    not any(build.flags <= processor_flags() for build in BUILDS.values()),
    reason="no build of the library is for this processor",
)


def compile_library(folder: Path, build: str, *flags: str) -> list[Path]:
    """The objects of one build of the library."""
    return compile_all(folder, sorted(SOURCES.glob("*.cpp")), *BUILDS[build].options, *flags)


def compile_all(folder: Path, sources: Sequence[Path], *flags: str, compiler: str = COMPILER) -> list[Path]:
    """The objects of `sources`, compiled two at a time."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    for first in range(0, len(commands), 2):
        running = [subprocess.Popen(command) for command in commands[first : first + 2]]
        assert [process.wait() for process in running] == [0] * len(running)
    return objects


def stress(program: Path, *arguments: int, seconds: float) -> int:
    """How many rounds of a program of `NATIVE` held."""
    run = subprocess.run(
        [program, *map(str, arguments), str(seconds)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300 + 3 * seconds,
        env={"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert run.returncode == 0, (run.returncode, run.stdout + run.stderr)
    return int(run.stdout.split()[0])


def link(to: Path, objects: Sequence[Path], *flags: str, compiler: str = COMPILER) -> Path:
    subprocess.run([compiler, "-pthread", *map(str, objects), *flags, "-o", str(to)], check=True)
    return to


def runtime(name: str) -> str:
    """Where the compiler keeps a sanitizer's library."""
    answer = subprocess.run([COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()
