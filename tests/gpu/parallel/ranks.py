"""Ranks as processes of their own, stepped side by side by the same plans, without an executor."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from engine.plan import ModelRunnerOutput, SchedulerOutput
from gpu.checkpoint import ModelConfig, open_model
from gpu.cpu.communicator import SharedMemoryCommunicator
from gpu.cpu.library import load_library
from gpu.model_loader import rank_spec
from gpu.models.communicators import TorchCommunicator
from gpu.runner.host_runner import ModelRunner
from gpu.runner.runner import FinishedStep, StageLinks, WorkerOptions
from gpu.sharding import Layout, cut
from gpu.weights.reading import read_weights
from gpu.worker import Worker
from tests.golden.histories import weights_of

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
SECONDS = 200.0  # that anything may take here

Case = tuple[ModelConfig | Path, WorkerOptions]  # random weights of a configuration, or those of a file
Step = Callable[["RankExecutor"], Any]
Join = Callable[[Layout, str], Any]


class RankExecutor:
    """What `tests.gpu.test_executor.generate` wants, on one rank: what the last stage samples is told to all others."""

    def __init__(self, worker: Worker, layout: Layout, outputs: list[Connection]) -> None:
        self.worker = worker
        self._layout = layout
        self._outputs = outputs  # to all earlier stages' ranks, or from the last one

    def submit(self, plan: SchedulerOutput) -> FinishedStep:
        output = self.worker.runner.submit(plan).result()
        if self._layout.is_last_stage:
            for connection in self._outputs:
                connection.send(output.sampled_token_ids)
        else:
            assert output.sampled_token_ids == [[] for _ in plan.request_ids]
            sampled = self._outputs[0].recv()
            if plan.request_ids:
                assert isinstance(self.worker.runner, ModelRunner)
                self.worker.runner.record(sampled)
            output = ModelRunnerOutput(sampled_token_ids=sampled, logprobs={})
        return FinishedStep(output)


def run(
    tp: int,
    pp: int,
    folder: Path,
    cases: list[Case],
    step: Step,
    join: Join | None = None,
    *,
    whole_experts: bool = False,
) -> list[list[Any]]:
    """What `step` returns of each case, on each rank. `join` makes the communicator of a rank, by default gloo's."""
    world = tp * pp
    activations = {rank: PROCESSES.Pipe(duplex=False) for rank in range(tp, world)}  # to this rank, from its left
    tokens = {rank: PROCESSES.Pipe(duplex=False) for rank in range(world - tp)}
    results = [PROCESSES.Pipe(duplex=False) for _ in range(world)]
    with processes() as start:
        for rank in range(world):
            layout = Layout(
                tensor_parallel_size=tp, pipeline_parallel_size=pp, enable_expert_parallel=whole_experts, rank=rank
            )
            links = activations.get(rank, (None,))[0], activations.get(rank + tp, (None, None))[1]
            outputs = [tokens[rank][0]] if rank in tokens else []
            if rank == world - tp:
                outputs = [sender for _, sender in tokens.values()]
            communicator = partial(join or join_gloo, layout, str(folder / "store"))
            start(partial(_rank, layout, communicator, cases, step, links, outputs, results[rank][1]))
        found = []
        for (receiver, sender), process in zip(results, start.__self__, strict=True):  # type: ignore[attr-defined]
            sender.close()
            assert receiver.poll(SECONDS), "a rank hangs"
            found.append(receiver.recv())
            process.join(SECONDS)
        return found


class _Started(list[Any]):
    def start(self, target: Callable[[], None]) -> None:
        process = PROCESSES.Process(target=target, daemon=True)
        process.start()
        self.append(process)


@contextmanager
def processes() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Starts processes, and ends those that are left."""
    started = _Started()
    try:
        yield started.start
    finally:
        for process in started:
            process.kill()
            process.join()


def join_memory(layout: Layout, path: str) -> SharedMemoryCommunicator | None:
    """The tensor group of a rank, over a file that all ranks of its stage map."""
    library = load_library()
    assert library is not None
    if layout.tensor_parallel_size == 1:
        return None
    descriptor = os.open(f"{path}-{layout.pp_rank}", os.O_RDWR | os.O_CREAT)
    return SharedMemoryCommunicator(library, descriptor, layout.tp_rank, layout.tensor_parallel_size)


def join_gloo(layout: Layout, store: str, timeout: float = SECONDS) -> TorchCommunicator | None:
    """The tensor group of a rank, over the loopback device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if layout.tensor_parallel_size == 1:
        return None
    return TorchCommunicator(dist.FileStore(store, layout.world_size), layout, "cpu", timeout)  # type: ignore[attr-defined]


def _rank(
    layout: Layout,
    join: Callable[[], Any],
    cases: list[Case],
    step: Step,
    links: tuple[Connection | None, Connection | None],
    outputs: list[Connection],
    result: Connection,
) -> None:
    communicator = join()
    found = []
    for model, options in cases:
        worker = load(model, options, layout, communicator, *links)
        found.append(step(RankExecutor(worker, layout, outputs)))
    result.send(found)


def load(
    model: ModelConfig | Path,
    options: WorkerOptions,
    layout: Layout,
    communicator: Any = None,
    left: Connection | None = None,
    right: Connection | None = None,
) -> Worker:
    """A rank with its part of the weights."""
    if isinstance(model, Path):
        files = open_model(str(model))
        config = files.config
        spec = rank_spec(config, options, "cpu", layout)
        weights = read_weights(files, spec)
    else:
        config, spec = model, rank_spec(model, options, "cpu", layout)
        weights = cut(weights_of(model), spec)
    links = _links(left, right, config.hidden_size)
    return Worker(config, weights, options, spec=spec, communicator=communicator, links=links)


def _links(left: Connection | None, right: Connection | None, hidden_size: int) -> StageLinks:
    def receive(num_tokens: int) -> NDArray[np.float32]:
        assert left is not None
        hidden: NDArray[np.float32] = left.recv()
        assert hidden.shape == (num_tokens, hidden_size)
        return hidden

    return StageLinks(receive=None if left is None else receive, send=None if right is None else right.send)
