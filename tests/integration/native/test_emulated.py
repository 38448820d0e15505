"""The builds for 64-bit ARM, compiled by the distribution's cross compiler and run by its emulator: they compute what a
build for this processor does. native/every_result.cpp has all that is compared.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from gpu.cpu.builds import BUILDS
from gpu.cpu.library import built, usable
from tests.gpu.native_builds import NATIVE, compile_all, compile_library, link, needs_library

pytestmark = needs_library

ARM = [name for name, build in BUILDS.items() if build.machine == "aarch64"]
PROGRAM = NATIVE / "every_result.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max")


def lines(*command: str | Path) -> list[list[str]]:
    """What the program prints: a name and numbers in each line."""
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return [line.split() for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the plainest build that runs here computes."""
    folder, build = tmp_path_factory.mktemp("native"), list(usable())[-1].name
    objects = compile_all(folder, [PROGRAM], "-O1", *BUILDS[build].options)
    library = built()[build]
    return lines(link(folder / "program", [*objects, library], f"-Wl,-rpath,{library.parent}"))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("build", ARM)
def test_what_is_computed_on_arm_is_what_is_computed_here(tmp_path: Path, expected: list[list[str]], build: str):
    objects = compile_library(tmp_path, build, "-O1", without=["decoder.cpp"], compiler=COMPILER)
    objects += compile_all(tmp_path, [PROGRAM], "-O1", *BUILDS[build].options, compiler=COMPILER)
    seen = lines(*EMULATOR, link(tmp_path / "program", objects, "-static", compiler=COMPILER))
    assert len(seen) > 40
    assert [line[0] for line in seen] == [line[0] for line in expected]
    # Those that multiply bfloat16 round activations; elsewhere only sums are in another order.
    tolerance = 1e-2 if "bf16" in build else 1e-4
    for (name, *numbers), (_, *others) in zip(seen, expected, strict=True):
        a, b = np.array(numbers, float), np.array(others, float)
        # By the norm: where a key lies between two bfloat16 numbers, a last bit decides and its token differs by more.
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name
    # Rows alone and in a batch, and prompts in one piece or several, are the same bits.
    assert seen[-1] == expected[-1] == ["differ", "0"]
    tokens = [line for line in expected if line[0] in ("tokens", "finite")]
    assert [line for line in seen if line[0] in ("tokens", "finite")] == tokens
