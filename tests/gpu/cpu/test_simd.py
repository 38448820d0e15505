"""The vectors of csrc/simd.h for every instruction set, against scalars, as native/simd_functions.cpp compares them.

64-bit ARM is built by the distribution's cross compiler and run by its emulator.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from gpu.host import processor_flags
from tests.gpu.native_builds import COMPILER, FLAGS, NATIVE
from tests.selection import slow_except

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
X86 = {"avx2": {"avx2", "fma", "f16c"}, "avx512": AVX512, "avx512 bf16": AVX512 | {"avx512_bf16"}}
RUNNABLE = [name for name, needed in X86.items() if needed <= processor_flags()]
ARM = {"neon": "armv8-a", "neon bf16": "armv8.2-a+bf16"}


def check(command: list[str], program: Path, *runner: str) -> None:
    sources = [str(NATIVE / "simd_functions.cpp"), "-o", str(program)]
    subprocess.run([*command, *FLAGS, "-O3", "-Wno-psabi", *sources], check=True)
    run = subprocess.run([*runner, program], check=False, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "0 wrong\n"), run.stdout + run.stderr


def test_an_x86_processor_runs_one_of_the_sets_at_least():
    assert RUNNABLE or platform.machine() != "x86_64"


@pytest.mark.parametrize("name", slow_except(RUNNABLE, *RUNNABLE[-1:]))
def test_every_function_is_that_of_scalars(tmp_path: Path, name: str):
    check([COMPILER, *("-m" + flag.replace("_", "") for flag in sorted(X86[name]))], tmp_path / "simd_functions")


@pytest.mark.slow  # needs an emulator
@pytest.mark.parametrize("name", ARM)
def test_every_function_is_that_of_scalars_on_arm(tmp_path: Path, name: str):
    command = ["aarch64-linux-gnu-g++", f"-march={ARM[name]}", "-static"]
    check(command, tmp_path / "simd_functions", "qemu-aarch64", "-cpu", "max")
