"""Captures that fail: on a card that is made up, and on one of two ranks that are real processes with gloo between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.device.graphs import AgreedGraphs, CaptureFailed, CudaGraphs, Replay
from gpu.device.runner import DeviceRunner
from gpu.sharding import Layout
from tests.gpu.device_runners import CPU, Again, make_executor
from tests.gpu.parallel.ranks import PROCESSES, SECONDS, join_gloo, processes

POOL = (0, 7)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls to a card on which every capture fails."""
    notes: list[str] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            assert options["pool"] == POOL
            notes.append("begin")

        def capture_end(self) -> None:
            notes.append("end")
            raise RuntimeError("the capture was invalidated")

    class Stream:
        def wait_stream(self, other: Stream) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: notes.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: notes.append(f"out of pool {given}"))
    return notes


def test_the_first_error_of_a_capture_is_told_and_the_allocator_is_taken_out_of_it(notes: list[str]) -> None:
    def run() -> None:
        if notes[-1:] == ["begin"]:
            raise ValueError("the kernel cannot be captured")

    with pytest.raises(CaptureFailed, match="ValueError: the kernel cannot be captured"):
        CudaGraphs(torch.device("cuda:1")).capture(run)
    assert notes == ["synchronize", "begin", "end", f"out of pool (1, {POOL})"]


def test_a_capture_that_only_its_end_refuses_leaves_the_allocator_too(notes: list[str]) -> None:
    with pytest.raises(CaptureFailed, match="the capture was invalidated"):
        CudaGraphs(torch.device("cuda:1")).capture(lambda: None)
    assert notes == ["synchronize", "begin", "end", f"out of pool (1, {POOL})"]


class FailingThird(Again):
    """Graphs of which the third cannot be captured."""

    def capture(self, run: Callable[[], None]) -> Replay:
        replay = super().capture(run)
        if self.num_captured == 3:
            raise CaptureFailed("out of memory")
        return replay


def _rank(layout: Layout, store: str, results: Connection) -> None:
    """Run one rank with a model of its own, which captures what it can."""
    communicator = join_gloo(layout, store)
    assert communicator is not None
    runner = make_executor("device", FailingThird() if layout.rank == 1 else Again()).runner
    assert isinstance(runner, DeviceRunner)
    assert runner._graphs is not None
    runner._graphs._graphs = AgreedGraphs(runner._graphs._graphs, communicator, CPU)
    while runner.prepare():
        pass
    results.send((len(runner._graphs._captured), runner.num_missing_graphs))
    results.recv()


@pytest.mark.slow
def test_ranks_have_the_same_graphs(tmp_path: Path) -> None:
    ends = [PROCESSES.Pipe() for _ in range(2)]
    with processes() as start:
        for rank, (_, theirs) in enumerate(ends):
            layout = Layout(tensor_parallel_size=2, rank=rank)
            start(partial(_rank, layout, str(tmp_path / "store"), theirs))
        for ours, _ in ends:
            assert ours.poll(SECONDS), "a rank hangs"
        found = [ours.recv() for ours, _ in ends]
        for ours, _ in ends:
            ours.send(None)
    assert found == [(2, 0)] * 2
