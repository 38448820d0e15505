"""The GPU benchmark: its rooflines against figures worked out elsewhere, and its whole control flow on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loadtest.gpu_parts.engine_runs import Sizes, nano_lengths
from loadtest.gpu_parts.models import load_shape
from loadtest.gpu_parts.report import Report, Row
from loadtest.gpu_parts.rooflines import Card, ModelWork

H100 = Card(bandwidth=3.35e12, flops=989e12)  # its datasheet

# Floors of a decode step at context 1024 in milliseconds, for batches of 1, 8, 64 and 256.
FLOORS = {
    "Llama-3.1-8B": (4.52, 4.80, 7.04, 14.74),
    "Llama-3.2-1B": (0.75, 0.82, 1.38, 3.30),
    "Qwen3-0.6B": (0.39, 0.64, 2.60, 9.33),
    "Qwen3-8B": (4.56, 4.88, 7.40, 16.06),
}


@pytest.mark.parametrize("name", list(FLOORS))
def test_decode_floors_are_those_of_the_datasheet(name):
    work = ModelWork(load_shape(name))
    floors = [work.decode_floor(H100, batch, 1024) * 1e3 for batch in (1, 8, 64, 256)]
    assert floors == pytest.approx(FLOORS[name], abs=0.006)


@pytest.mark.slow
def test_the_workload_is_nano_vllms_and_has_its_roofline():
    requests = nano_lengths(Sizes())
    lengths = [(len(prompt), output) for prompt, output in requests]
    assert (sum(prompt for prompt, _ in lengths), sum(output for _, output in lengths)) == (142_827, 133_966)
    work = ModelWork(load_shape("Llama-3.1-8B"))
    assert 133_966 / work.throughput_floor(H100, lengths) == pytest.approx(11_800, rel=0.005)
    assert work.prefill_flops(1, 1024) / H100.flops * 1e3 == pytest.approx(14.7, abs=0.05)


def test_shares_say_how_much_of_the_reference_is_reached(tmp_path):
    assert Row("kernel", "a time", 20.0, "us", 15.0).share == 0.75
    assert Row("card", "a rate", 15.0, "tok/s", 20.0).share == 0.75
    assert Row("card", "alone", 15.0, "tok/s").share is None
    report = Report()
    report.add("kernel", "a time", 20.0, "us", 15.0)
    report.note("something was left out")
    report.write(tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["rows"][0]["share"] == 0.75
    assert "| kernel | a time | 20.0 | us | 15.0 | 75% |" in report.table()
    assert "note: something was left out" in report.table()


@pytest.mark.slow
def test_the_whole_benchmark_runs_on_a_cpu_with_tiny_shapes(tmp_path):
    path = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu_bench", "--tiny", "--device", "cpu", "--json", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    figures = json.loads(path.read_text())
    assert figures["failures"] == figures["notes"] == []
    measured = {(row["part"], row["name"].split(",")[0]) for row in figures["rows"] if row["value"] > 0}
    for wanted in (
        ("card", "copy bandwidth"),
        ("kernel", "decode attention"),
        ("torch", "prefill attention"),
        ("cuBLAS", "head"),
        ("tiny", "decode step"),
        ("tiny", "host time of a step"),
        ("tiny", "prefill"),
        ("tiny", "nano-vllm workload"),
        ("transformers", "tiny: continuous batching"),
    ):
        assert any(part == wanted[0] and name.startswith(wanted[1]) for part, name in measured), (wanted, measured)
    assert run.stdout.rstrip().splitlines()[-1].startswith("| ")  # the table comes last
