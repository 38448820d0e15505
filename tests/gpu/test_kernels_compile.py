"""The kernels as the compiler sees them: what the interpreter accepts must also become code for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu.kernels

MULTIPLYING = ("_decode", "_few_rows", "_prefill", "_grouped_linear", "_quantized_linear")
# What a multiprocessor gives one block.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = ("bfloat16", "float16", "float32")


def compiled(folder: Path, capability: int, dtype: str, *kernels: str) -> list[dict[str, Any]]:
    """Compile all kernels, or those named, in every form. Fail if one spills registers or exceeds the shared memory."""
    reports = printed("compile_kernels", str(capability), dtype, *kernels, TRITON_CACHE_DIR=str(folder))
    for report in reports:
        # On sm_89, from float32, `_finish` of the sampler keeps one address on the stack: stored and loaded once.
        assert report["stack"] <= (8 if report["kernel"] == "_finish" else 0), report
        assert report["shared"] <= SHARED_MEMORY[capability], report
        assert report["joins"], report  # multiplications and additions, as bits depend on it
        # There is no exact instruction for float32.
        multiplies = report["kernel"] in MULTIPLYING and (dtype != "float32" or "_quantized" in report["kernel"])
        assert bool(report["matrix_instructions"]) == multiplies, report
    return reports


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler, in a process that starts, on cores that others use too
def test_every_kernel_compiles_for_hopper_without_spilling_registers(tmp_path):
    reports = compiled(tmp_path, 90, "bfloat16")
    assert {report["kernel"] for report in reports} == launched_kernels()
    for report in reports:
        # Those of the draw are what it costs, sixteen tokens at a time; most of them make random bits.
        assert report["kernel"] != "_race" or report["instructions"] < 1000, report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_compiles_for_a_card_with_operands_in_registers_without_spilling_them(tmp_path):
    assert compiled(tmp_path, 89, "float16", "_prefill")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_weights_and_caches_of_few_bits_compile_for_every_card_without_spilling_registers(tmp_path, capability):
    kernels = {report["kernel"] for report in compiled(tmp_path, capability, "bfloat16", "narrow")}
    assert kernels >= ({"_quantized_linear"} if capability < 89 else {"_quantized_linear", "_decode", "_prefill"})


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_rehearsal_starts_is_all_that_is_ever_compiled():
    rehearsed, later, of_stage, later_of_stage = printed("compile_census")
    # The model of the census has no experts and no quantized layers.
    of_others = {"_grouped_linear", "_combine", "_quantized_linear", "_quantized_row", "_quantize_rows", "_dequantize"}
    assert {form.partition(",")[0] for form in rehearsed} == launched_kernels() - of_others
    assert later == []
    assert any(form.startswith("_prefill") for form in of_stage)
    assert later_of_stage == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pool_compiles_all_kernels_before_the_first_runs_and_reports_each(tmp_path):
    [found] = printed("compile_in_pool", str(tmp_path))
    assert found["broken parses"] == []
    assert len(found["serial"]) == 5
    assert found["pool"] == found["serial"]
    assert (found["in memory"], found["unfinished"], found["again"]) == (5, 0, True)
    assert found["asked by launches"] == []

    assert found["stopped"].startswith("Stop")
    assert 1 <= found["before the stop"] < 5, "those that had not begun are cancelled"
    assert found["after the stop"] == found["serial"], "what was cancelled can be compiled later"
    assert found["wrong"].startswith("HeadraceError: Triton cannot compile the kernel _wrong: CompilationError")

    def compiling(number: int) -> list[Any]:
        done = range(1, number + 1)
        return [["Compiling kernels", 0, None], *(["Compiling kernels", each, number] for each in done)]

    steps = [["Measuring the memory of steps", done, 6] for done in range(7)]
    graphs = [["Measuring the memory of CUDA graphs", done, 2] for done in range(2)]
    assert found["reports"] == compiling(found["of the worker"]) + steps + graphs
    assert found["asked by the worker"] == []
    of_stage = found["reports of a stage"]
    assert len(of_stage) > 5
    assert of_stage == compiling(len(of_stage) - 1)


def printed(module: str, *arguments: str, **environment: str) -> list[Any]:
    """What a module of the tests prints, a line of JSON each. It runs where Triton does not interpret."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *arguments],
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
