"""Seconds of a piece of work on a device: the median of several runs, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any card there is
MAX_RUNS, MIN_RUNS = 50, 5
SECONDS_PER_MEASURE = 0.15


class Timer:
    """Times functions that only launch work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.on_cuda else 1, dtype=torch.uint8, device=device)

    def seconds(self, function: Callable[[], object], *, replayed: bool = True) -> float:
        """Return the median. The first calls compile and choose algorithms, and are not counted. `replayed`: as a CUDA
        graph, as steps are, so that the host's launches do not count."""
        for _ in range(3 if self.on_cuda else 1):
            function()
        self.synchronize()
        started = time.perf_counter()
        function()
        self.synchronize()
        estimate = time.perf_counter() - started
        runs = min(max(int(SECONDS_PER_MEASURE / max(estimate, 1e-6)), MIN_RUNS), MAX_RUNS)
        return self._on_cuda(function, runs, replayed) if self.on_cuda else self._on_cpu(function, MIN_RUNS)

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def _on_cuda(self, function: Callable[[], object], runs: int, replayed: bool) -> float:
        """Return the time between two events of the device. Without a graph, or where none can be captured, the
        function is launched while the device empties its cache, and the host's time beyond that counts."""
        with suppress(RuntimeError):
            if replayed:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    function()
                function = graph.replay
        self.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3

    @staticmethod
    def _on_cpu(function: Callable[[], object], runs: int) -> float:
        taken = []
        for _ in range(runs):
            started = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)
