"""`python -m tests.integration.cluster.executor_process`: run ranks on two machines of a Ray cluster, print JSON.

A process of its own, because Ray stays in one that it has been in.
"""

from __future__ import annotations

import itertools
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

from tests.integration.cluster.machines import machines  # before Ray is imported

import ray  # isort: skip
from ray._private import state  # isort: skip

from engine.errors import EngineDead, HeadraceError
from gpu.checkpoint import open_model
from gpu.executor import load_executor
from gpu.parallel.ray_ranks import RayExecutor
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request
from tests.gpu.test_executor import generate, prompts
from tests.integration.cluster.cluster import actors
from tests.support.tiny_model import write_tiny_model

OPTIONS = WorkerOptions(device="cpu", max_model_len=64, max_num_seqs=8, block_size=4, num_threads=1)
SPREAD = replace(OPTIONS, num_threads=2)  # a rank of these fills a machine
ALONE, PAIR = Layout(), Layout(tensor_parallel_size=2)
STAGES = Layout(tensor_parallel_size=2, pipeline_parallel_size=2)  # on machines of two cores, each on one of them
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def start(model: str, options: WorkerOptions = OPTIONS, layout: Layout = ALONE) -> RayExecutor:
    files = {"model": model, "cache_dir": None, "load_format": "dummy"}
    return RayExecutor(files, options, layout, lambda phase, done, total: None, hidden_size=LAYERS["hidden_size"])


def whereabouts(executor: RayExecutor) -> list[tuple[int, str]]:
    """Process and machine of each rank, as Ray knows them."""
    actors = [state.actors(rank._actor._actor_id.hex()) for rank in executor._ranks]  # type: ignore[attr-defined]
    return [(actor["Pid"], actor["Address"]["NodeID"]) for actor in actors]


def same_tokens(executor: RayExecutor, model: str, options: WorkerOptions) -> dict[str, Any]:
    alone = load_executor(open_model(model, load_format="dummy"), options)
    expected = generate(alone, prompts(), chunk=6)
    tokens = generate(executor, prompts(), chunk=6)
    return {"tokens": tokens, "expected": expected, "nodes": [node for _, node in whereabouts(executor)]}


def shared(model: str) -> dict[str, Any]:
    """Two ranks that share layers, each on a machine of its own."""
    options = replace(SPREAD, dtype="float32")
    executor = start(model, options, PAIR)
    found = same_tokens(executor, model, options)
    executor.shutdown()
    return found


def killed(executor: RayExecutor, victim: int) -> dict[str, Any]:
    """Of a rank that is killed while the stages work."""
    told: list[tuple[HeadraceError, float]] = []
    lost = threading.Event()

    def on_lost(error: HeadraceError) -> None:
        told.append((error, time.monotonic()))
        lost.set()

    executor.watch(on_lost)
    request = new_request("a", [5, 6], block_ids=[0, 1])
    (pid, _), began = whereabouts(executor)[victim], 0.0
    for number in itertools.count():
        if number == 5:
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        try:
            executor.submit(plan_of({"a": 2}, new=[request])).result()
            executor.submit(plan_of({}, removed=["a"])).result()
        except EngineDead as error:
            later = type(error).__name__
            break
    assert lost.wait(60)
    executor.shutdown()
    [(named, ended)] = told
    said = {"kind": type(named).__name__, "said": str(named), "later": later, "seconds": ended - began}
    return {"victim": victim, "host": socket.gethostname(), **said}


def refused(model: str) -> str:
    try:
        start(model, SPREAD, PAIR)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    with machines(2, 2) as cluster, tempfile.TemporaryDirectory() as folder:
        ray.init(address=cluster.address, log_to_driver=False)
        model = str(write_tiny_model(Path(folder) / "tiny", vocab_size=4096, **LAYERS))
        executor = start(model, layout=STAGES)
        found: dict[str, Any] = {"stages": same_tokens(executor, model, OPTIONS), "killed": killed(executor, 2)}
        found["refused"] = refused(model)
        found["shared"] = shared(model)
        executor = start(model)  # and again, where others have been
        found["again"] = generate(executor, prompts(), chunk=6)
        executor.shutdown()
        until = time.monotonic() + 60
        while (left := actors(os.getpid(), "RankActor")) and time.monotonic() < until:
            time.sleep(0.05)  # Ray kills in its own time
        found["left"] = left
        ray.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
