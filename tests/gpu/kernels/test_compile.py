"""The kernels as the compiler sees them: what the interpreter accepts must also become code for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu.kernels

MULTIPLYING = ("_decode", "_prefill", "_grouped_linear")
# What a multiprocessor gives one block.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = ("bfloat16", "float16", "float32")


def compiled(folder: Path, capability: int, dtype: str, *kernels: str) -> list[dict[str, Any]]:
    """Compile all kernels, or those named, in every form. Fail if one spills registers or exceeds the shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_kernels", str(capability), dtype, *kernels],
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    for report in reports:
        assert report["stack"] == 0, report
        assert report["shared"] <= SHARED_MEMORY[capability], report
        assert report["joins"], report  # multiplications and additions, as bits depend on it
        multiplies = report["kernel"] in MULTIPLYING and dtype != "float32"  # of which there is no exact instruction
        assert bool(report["matrix_instructions"]) == multiplies, report
    return reports


@pytest.mark.timeout(600)  # a compiler, in a process that starts, on cores that others use too
def test_every_kernel_compiles_for_hopper_without_spilling_registers(tmp_path):
    reports = compiled(tmp_path, 90, "bfloat16")
    assert {report["kernel"] for report in reports} == launched_kernels()
    for report in reports:
        # Those of the draw are what it costs, sixteen tokens at a time; most of them make random bits.
        assert report["kernel"] != "_race" or report["instructions"] < 1000, report


@pytest.mark.timeout(600)
def test_attention_compiles_for_a_card_with_operands_in_registers_without_spilling_them(tmp_path):
    assert compiled(tmp_path, 89, "float16", "_prefill")


@pytest.mark.storm
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_for_every_card_without_spilling_registers(tmp_path, capability, dtype):
    assert {report["kernel"] for report in compiled(tmp_path, capability, dtype)} == launched_kernels()


def launched_kernels() -> set[str]:
    """The names that are launched, as `_name[grid](...)`, anywhere in gpu.kernels."""
    sources = [path.read_text() for path in Path(gpu.kernels.__file__).parent.glob("*.py")]
    defined = {
        line.split("def ")[1].split("(")[0]
        for source in sources
        for before, line in zip(source.splitlines(), source.splitlines()[1:], strict=False)
        if line.startswith("def ") and (before.startswith("@triton.jit") or before == ")")
    }
    return {name for name in defined if any(f"{name}[" in source for source in sources)}


@pytest.mark.timeout(600)
def test_what_the_rehearsal_starts_is_all_that_is_ever_compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_census"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rehearsed, later = (json.loads(line) for line in run.stdout.splitlines())
    of_experts = {"_grouped_linear", "_combine"}  # which the model of the census has none of
    assert {form.partition(",")[0] for form in rehearsed} == launched_kernels() - of_experts
    assert later == []
