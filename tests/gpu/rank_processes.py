"""Ranks of the library's decoder as processes of their own, each with its part of a model, told one call at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import Weight
from gpu.cpu.communicator import SharedMemoryCommunicator, make_segment
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import Library
from gpu.runner.runner import ModelInputs
from gpu.sharding import Layout, cut, sharded

Weights = Callable[[], Iterable[tuple[str, Weight]]]
Check = Callable[[], None]
BLOCK_SIZE, NUM_BLOCKS = 16, 80
MAX_TOKENS, MAX_MODEL_LEN = 256, 600


def make_model(
    library: Library,
    config: ModelConfig,
    weights: Weights,
    spec: DecoderSpec | None = None,
    communicator: SharedMemoryCommunicator | None = None,
    *,
    num_threads: int = 1,
    max_num_batched_tokens: int = MAX_TOKENS,
    quantized: bool = True,
) -> CPUCausalLM:
    """One rank of a model, or all of it."""
    model = CPUCausalLM(
        library,
        config,
        cut(weights(), spec or spec_of(config)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_threads=num_threads,
        quantized=quantized,
        spec=spec,
        communicator=communicator,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    model.allocate_kv_cache(NUM_BLOCKS)
    return model


class RankProcesses:
    """A call goes to all ranks of a stage, and to the next stage with what the one before gave."""

    def __init__(self, layout: Layout, connections: list[Connection], pids: list[int], segments: list[int]) -> None:
        self.layout = layout
        self.connections = connections
        self.pids = pids
        self.segments = segments  # of each stage

    def forward(self, inputs: ModelInputs) -> NDArray[np.float32]:
        """The last stage's hidden states."""
        hidden: NDArray[np.float32] | None = None
        for stage in range(self.layout.pipeline_parallel_size):
            self.send(stage, "forward", inputs._replace(hidden=hidden))
            (hidden,) = self._same(stage)
        assert hidden is not None
        return hidden

    def last(self, name: str, hidden: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
        """`compute_logits` or `most_likely` of the last stage."""
        stage = self.layout.pipeline_parallel_size - 1
        self.send(stage, name, hidden)
        return self._same(stage)

    def ranks(self, stage: int) -> range:
        size = self.layout.tensor_parallel_size
        return range(stage * size, (stage + 1) * size)

    def send(self, stage: int, *call: Any) -> None:
        for rank in self.ranks(stage):
            self.connections[rank].send(call)

    def answer(self, rank: int) -> Any:
        """What a rank's call has returned. Raises what it has raised."""
        answer = self.connections[rank].recv()
        if isinstance(answer, _Raised):
            raise answer.kind.__new__(answer.kind, answer.text)  # whatever it is made of
        return answer

    def _same(self, stage: int) -> tuple[NDArray[Any], ...]:
        first, *others = (self.answer(rank) for rank in self.ranks(stage))
        for other in others:
            assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))
        return first


class _Raised(NamedTuple):
    kind: type[Exception]
    text: str


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def rank_processes(
    library: Library,
    config: ModelConfig,
    weights: Weights,
    layout: Layout,
    *,
    timeout: float = 300,
    checks: Callable[[int], Check | None] = lambda rank: None,
    before: Callable[[int, CPUCausalLM], object] = lambda rank, model: None,
    **options: Any,
) -> Iterator[RankProcesses]:
    """`checks` gives a rank what it asks within a pass, `before` is what it does before each."""
    context = multiprocessing.get_context("fork")  # what they need is here already
    segments = [make_segment() for _ in range(layout.pipeline_parallel_size)]
    connections: list[Connection] = []
    processes = []

    def work(connection: Connection, own: Layout) -> None:
        for other in connections:  # so that they end where a process does
            other.close()
        own_spec, communicator = sharded(spec_of(config), own, gathers=True), None
        if layout.tensor_parallel_size > 1:
            communicator = SharedMemoryCommunicator(
                library,
                segments[own.pp_rank],
                own.tp_rank,
                layout.tensor_parallel_size,
                timeout,
                own.rank - own.tp_rank,
            )
        model = make_model(library, config, weights, own_spec, communicator, **options)
        connection.send("ready")
        while True:
            name, argument = connection.recv()
            try:
                if name == "forward":
                    before(own.rank, model)
                    connection.send((model.forward(argument, checks(own.rank)),))
                elif name == "compute_logits":
                    connection.send((model.compute_logits(argument).copy(),))
                else:
                    connection.send(model.most_likely(argument))
            except Exception as error:
                connection.send(_Raised(type(error), str(error)))

    try:
        for rank in range(layout.world_size):
            ours, theirs = context.Pipe()
            connections.append(ours)
            process = context.Process(target=work, args=(theirs, replace(layout, rank=rank)), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        for connection in connections:  # so that no deadline begins before all are there
            assert connection.recv() == "ready"
        yield RankProcesses(layout, connections, [process.pid or 0 for process in processes], segments)
    finally:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        for segment in segments:
            os.close(segment)
