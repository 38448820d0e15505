"""C++ that the tests compile and run: by the compiler that `make test` installs, for the processor they run on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


def compile_library(
    folder: Path, build: str, *flags: str, without: Sequence[str] = (), compiler: str = COMPILER
) -> list[Path]:
    """The object of one build of the library, in one unit: half of what its files take are the headers they share."""
    names = sorted(source.name for source in SOURCES.glob("*.cpp") if source.name not in without)
    whole = folder / "library.cpp"
    whole.write_text("".join(f'#include "{name}"\n' for name in names))
    return compile_all(folder, [whole], *BUILDS[build].options, *flags, compiler=compiler)


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


def link(to: Path, objects: Sequence[Path], *flags: str, compiler: str = COMPILER) -> Path:
    subprocess.run([compiler, "-pthread", *map(str, objects), *flags, "-o", str(to)], check=True)
    return to


def runtime(name: str) -> str:
    """Where the compiler keeps a sanitizer's library."""
    answer = subprocess.run([COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


def assert_tests_pass(script: str, arguments: Sequence[str], *libraries: str) -> None:
    """Run a script, which runs tests, in a process that a sanitizer of these libraries watches."""
    root = Path(__file__).parents[2]
    watched = {
        "LD_PRELOAD": " ".join(map(runtime, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter and of torch
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root, env=os.environ | watched)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:4000]
    assert " passed" in done.stdout


def build(folder: Path, source: Path, *flags: str) -> Path:
    """The program of one source."""
    return link(folder / f"{source.stem}-built", compile_all(folder, [source], *flags), *flags)


def dawdling(folder: Path, source: Path) -> Path:
    """The same with a chance of delay before every access to memory."""
    watched = compile_all(folder, [source], "-O1", "-fsanitize=thread")
    delays = compile_all(folder, [NATIVE / "dawdle.cpp"], "-O1")
    return link(folder / f"{source.stem}-dawdling", [*watched, *delays])


def run(program: Path, *arguments: float, timeout: float = 300) -> int:
    """The number that a program prints first. It has to end well, under sanitizers too."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode == 0, (done.returncode, (done.stdout + done.stderr)[-8000:])
    return int(done.stdout.split()[0])


def stress(program: Path, threads: int, seconds: float) -> int:
    """How many rounds of so many threads held."""
    return run(program, threads, seconds, timeout=300 + 3 * seconds)


@contextmanager
def busy_neighbour() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()
