"""`python -m tests.cluster.executor_process`: what becomes of ranks on two machines of a Ray cluster, as JSON.

A process of its own, because Ray stays in one that it has been in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster.machines import two_machines  # before Ray is imported

import ray  # isort: skip

from engine.errors import EngineDead, HeadraceError
from gpu.checkpoint import open_model
from gpu.executor import load_executor
from gpu.model_loader import WorkerOptions
from gpu.parallel.layout import Layout
from gpu.parallel.ray_executor import RayExecutor
from tests.gpu.test_executor import generate, prompts
from tests.gpu.test_input_batch import plan_of
from tests.server.tiny_model import write_tiny_model

OPTIONS = WorkerOptions(device="cpu", max_model_len=64, max_num_seqs=8, block_size=4, num_threads=1)


def start(model: str, options: WorkerOptions = OPTIONS, tensor_parallel_size: int = 1) -> RayExecutor:
    files = {"model": model, "cache_dir": None, "load_format": "dummy"}
    layout = Layout(tensor_parallel_size=tensor_parallel_size)
    return RayExecutor(files, options, layout, lambda phase, done, total: None, hidden_size=32)


def rank_processes(actor: str = "RankActor") -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command.read_text().startswith(f"ray::{actor}"):
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


def same_tokens(executor: RayExecutor, model: str) -> dict[str, Any]:
    alone = load_executor(open_model(model, load_format="dummy"), OPTIONS)
    expected = generate(alone, prompts(), chunk=6)
    return {"tokens": generate(executor, prompts(), chunk=6), "expected": expected}


def shared(model: str) -> dict[str, Any]:
    """Two ranks, each on a machine of its own."""
    options = replace(OPTIONS, dtype="float32")
    executor = start(model, options, tensor_parallel_size=2)
    alone = load_executor(open_model(model, load_format="dummy"), options)
    found = {"expected": generate(alone, prompts(), chunk=6), "tokens": generate(executor, prompts(), chunk=6)}
    executor.shutdown()
    return found


def killed(executor: RayExecutor) -> dict[str, Any]:
    """Of a rank that is killed while nothing is asked of it."""
    told: list[HeadraceError] = []
    lost = threading.Event()

    def on_lost(error: HeadraceError) -> None:
        told.append(error)
        lost.set()

    executor.watch(on_lost)
    [pid] = rank_processes()
    os.kill(pid, signal.SIGKILL)
    assert lost.wait(60)
    try:
        executor.submit(plan_of({})).result()
    except EngineDead as error:
        later = type(error).__name__
    executor.shutdown()
    return {"kind": type(told[0]).__name__, "said": str(told[0]), "later": later, "host": socket.gethostname()}


def refused(model: str) -> str:
    try:
        start(model, replace(OPTIONS, max_model_len=10**9))
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    with two_machines() as cluster, tempfile.TemporaryDirectory() as folder:
        ray.init(address=cluster.address, log_to_driver=False)
        model = str(write_tiny_model(Path(folder) / "tiny", vocab_size=4096))
        executor = start(model)
        found: dict[str, Any] = {"same_tokens": same_tokens(executor, model), "killed": killed(executor)}
        found["refused"] = refused(model)
        found["shared"] = shared(model)
        executor = start(model)  # and again, where the last one was
        found["again"] = generate(executor, prompts(), chunk=6)
        executor.shutdown()
        until = time.monotonic() + 60
        while (left := rank_processes()) and time.monotonic() < until:
            time.sleep(0.05)  # Ray kills in its own time
        found["left"] = left
        ray.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
