"""C++ compiled by the tests: with the compiler that `make test` installs, for the processor that they run on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpu.cpu.library import BUILDS, load_library

SOURCES = Path(__file__).parents[2] / "gpu/cpu/csrc"
NATIVE = Path(__file__).parent / "native"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-w", f"-I{SOURCES}"]


def vectors_of(build: str) -> list[str]:
    """What the compiler is told of the processors that a build is for."""
    return [f"-m{name.replace('avx512_', 'avx512').replace('_', '-')}" for name in sorted(BUILDS[build])]


def compile_library(folder: Path, *flags: str) -> tuple[str, list[Path]]:
    """The name of the build that this process uses, and its objects, compiled two files at a time."""
    library = load_library()
    assert library is not None
    return library.name, compile_all(folder, sorted(SOURCES.glob("*.cpp")), *vectors_of(library.name), *flags)


def compile_all(folder: Path, sources: Sequence[Path], *flags: str) -> list[Path]:
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    for first in range(0, len(commands), 2):
        running = [subprocess.Popen(command) for command in commands[first : first + 2]]
        assert [process.wait() for process in running] == [0] * len(running)
    return objects


def link(to: Path, objects: Sequence[Path], *flags: str) -> Path:
    subprocess.run([COMPILER, "-pthread", *map(str, objects), *flags, "-o", str(to)], check=True)
    return to


def runtime(name: str) -> str:
    """Where the compiler keeps a sanitizer's library."""
    answer = subprocess.run([COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()
