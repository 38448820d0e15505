"""Check the GPU path, and compare its speed with the card's limits and with other libraries, in one call.

    python -m loadtest.gpu_bench --json gpu_bench.json          on a CUDA device, within ten minutes
    python -m loadtest.gpu_bench --tiny --device cpu            its whole control flow, in seconds; figures mean nothing

In this order: the card's ceilings (copy bandwidth, matrix rate); every kernel against float64 or float32 references,
and only what is right is timed; kernels against their rooflines and torch's best (SDPA, cuBLAS); for each model, filled
with random weights, decode steps at batch 1 to 256 with their host time and idle time, prefill, and the nano-vllm
workload offline and over HTTP; the same with transformers. Every roofline is computed from the measured ceilings.
What does not fit into the time is left out and named. Ends with a table; the exit status is 1 if anything was wrong.
The JSON also has what steps cost, for `headrace simulate --table`.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec import to_builtins

from loadtest.gpu_parts import engine_runs, kernel_speed
from loadtest.gpu_parts.correctness import check_all
from loadtest.gpu_parts.models import PUBLISHED, load_shape
from loadtest.gpu_parts.peers import transformers_beside
from loadtest.gpu_parts.report import Report
from loadtest.gpu_parts.rooflines import Card, measure_card
from loadtest.gpu_parts.timing import Timer

PARTS = ("kernels", "engine", "served", "peers")
# Seconds that must be left for a part to be begun: what it takes with 8 billion parameters, and some more.
RESERVE = {"kernels": 30.0, "engine": 60.0, "served": 150.0, "peers": 90.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-0.6B", help=f"of {', '.join(PUBLISHED)}")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to run; correctness comes first in any case")
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="how long it may take; what does not fit is left out"
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: try the control flow")
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    report = Report()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(math.ceil(options.seconds))
    try:
        bench(report, options)
    finally:
        if options.json is not None:
            report.write(options.json)
        print(report.table())
    return 1 if report.failures else 0


def bench(report: Report, options: argparse.Namespace) -> None:
    """Run the parts in order. What goes wrong in one is a failure of the report, and the others still run."""
    started = time.monotonic()
    device = torch.device(options.device)
    parts = options.parts.split(",")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report.machine = describe(device)
    timer = Timer(device)
    copy_bytes, matrix_size = (2**20, 128) if options.tiny else (2**31, 8192)
    card = measure_card(timer, dtype, copy_bytes=copy_bytes, matrix_size=matrix_size)
    report.add("card", "copy bandwidth", card.bandwidth / 1e9, "GB/s")
    report.add("card", "matrix rate", card.flops / 1e12, "TFLOP/s")

    def time_is_left(part: str) -> bool:
        return time.monotonic() - started + RESERVE[part] < options.seconds

    with torch.inference_mode():
        correct = check_all(report, device, tiny=options.tiny)
        _free(device)
        if "kernels" in parts:
            kernel_sizes = kernel_speed.Sizes.tiny() if options.tiny else kernel_speed.Sizes()
            speed = kernel_speed.KernelSpeed(report, timer, card, dtype, kernel_sizes, correct)
            _guarded(report, "kernels", lambda: speed.run(partial(time_is_left, "kernels")))
    left_for_engine, left_for_peers = partial(time_is_left, "engine"), partial(time_is_left, "peers")
    models = ["tiny"] if options.tiny else options.models.split(",")
    sizes = engine_runs.Sizes.tiny() if options.tiny else engine_runs.Sizes()

    def beside(name: str) -> None:
        transformers_beside(report, name, load_shape(name), device, sizes, left_for_peers)

    for name in models:
        _free(device)
        if "engine" in parts:
            part = partial(offline, report, name, device, card, sizes, left_for_engine)
            _guarded(report, f"{name} offline", part)
        _free(device)
        if "served" in parts:
            if time_is_left("served"):
                left = options.seconds - (time.monotonic() - started)
                _guarded(report, f"{name} served", partial(served, report, name, device, sizes, left))
            else:
                report.note(f"{name} over HTTP was left out, for time")
        if "peers" in parts:
            _guarded(report, f"{name} beside transformers", partial(beside, name))


def offline(
    report: Report,
    name: str,
    device: torch.device,
    card: Card,
    sizes: engine_runs.Sizes,
    time_is_left: Callable[[], bool],
) -> None:
    """Measure one model without a server."""
    begun = time.monotonic()
    with engine_runs.loaded(name, load_shape(name), device, sizes) as model:
        report.add(name, "start to prepared, random weights", time.monotonic() - begun, "s")
        for part in (engine_runs.decode_steps, engine_runs.prefill, engine_runs.nano_offline):
            if time_is_left():
                part(report, model, card, sizes)
            else:
                report.note(f"{name}: {part.__name__} was left out, for time")
        report.engines[name] = {
            "step_cost": to_builtins(model.core.costs),
            "kv_cache": {"num_blocks": model.core.executor.num_blocks, "block_size": model.core.executor.block_size},
            "max_model_len": model.core.config.max_model_len,
            "settings": {"pipeline_depth": model.core.config.pipeline_depth},
        }


def served(report: Report, name: str, device: torch.device, sizes: engine_runs.Sizes, timeout: float) -> None:
    """The same behind a server, where a server can run."""
    try:
        from loadtest.gpu_parts.served import nano_served
    except ImportError as missing:
        report.note(f"{name} over HTTP was left out: {missing}")
        return
    nano_served(report, name, device, sizes, timeout)


def describe(device: torch.device) -> dict[str, object]:
    """Return the card and the versions of the packages."""
    facts: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            facts[package] = __import__(package).__version__
        except ImportError:
            facts[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    else:
        facts["device"] = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return facts


def _guarded(report: Report, what: str, part: Callable[[], None]) -> None:
    try:
        part()
    except (Exception, SystemExit) as problem:
        traceback.print_exc()
        report.fail(f"{what}: {type(problem).__name__}: {str(problem)[:300]}")


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError("the time was up")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
