"""Steps as CUDA graphs: one launch instead of hundreds.

There are two kinds. A "step" graph is for a number of decoding rows and holds the whole step, with the draw and the
feedback. A "hidden" graph is for a number of tokens, of decodes and chunks of prompts, and ends at their hidden states:
it serves steps with prefills, or with requests that want more than a token. A step takes the next larger graph of its
kind and pads. A larger graph needs more memory, so the largest is captured first and all others fit into its memory. No
step waits for its graph: until that is captured it runs eagerly, by the same kernels.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

import torch

from gpu.sharding import Communicator

LARGEST = 1024  # rows or tokens; the cost of launches matters less in larger steps

Replay = Callable[[], None]
Kind = Literal["step", "hidden"]


class CaptureFailed(Exception):
    """A graph could not be captured, although its work has run without error, so the device is usable."""


class Graphs(Protocol):
    """Turns a function that starts work on the device into one that starts it with one launch."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Call `run` and do its work at least once; it must have no lasting effect. Raises `CaptureFailed` if the work
        succeeds and the capture fails."""


class CudaGraphs:
    """Graphs of one CUDA device. They share their memory, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        # Kernels are compiled, loaded and tuned on first use, which is not allowed during a capture.
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time.
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(Exception):  # the first error has the reason
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:
            # After a failed capture the allocator is still in capture mode, and would never free memory again.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


class EagerGraphs:
    """A stand-in for `CudaGraphs` without graphs: each replay runs the work eagerly."""

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return run


class AgreedGraphs:
    """The graphs of one of several tensor ranks: a graph that one rank cannot capture is used by no rank.

    If one rank ran a step eagerly while the others replay it, their collectives would not match. So after each capture
    all ranks exchange whether they have the graph.
    """

    def __init__(self, graphs: Graphs, communicator: Communicator, device: torch.device) -> None:
        self._graphs = graphs
        self._communicator = communicator
        self._device = device

    def capture(self, run: Callable[[], None]) -> Replay:
        replay: Replay | None = None
        problem: CaptureFailed | None = None
        try:
            replay = self._graphs.capture(run)
        except CaptureFailed as error:
            problem = error
        all_have = all_ranks(replay is not None, self._communicator, self._device)
        if replay is not None and all_have:
            return replay
        raise problem or CaptureFailed("another tensor rank could not capture this graph")


def agreed(graphs: Graphs, communicator: Communicator | None, device: torch.device) -> Graphs:
    """Return `graphs`, or, with several tensor ranks, graphs that all ranks capture or none."""
    return graphs if communicator is None else AgreedGraphs(graphs, communicator, device)


def all_ranks(it_holds: bool, communicator: Communicator | None, device: torch.device) -> bool:
    """Return True if `it_holds` is true on every tensor rank. All ranks call it. Waits for the device."""
    if communicator is None:
        return it_holds
    denials = torch.zeros(1, 1, device=device) if it_holds else torch.ones(1, 1, device=device)
    communicator.all_reduce_(denials)
    return not denials.item()


def ladder(most: int) -> list[int]:
    """Return the ascending sizes of graphs up to `most`: 1, 2, 4, 8, 16, 24, 32, then in steps of 16 up to 256, of 32
    up to 512 and of 64 above. In large batches, where rows cost time, at most about an eighth is padding."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 256, 16), *range(256, 512, 32), *range(512, LARGEST + 1, 64)]
    largest = min(most, LARGEST)
    return [size for size in sizes if size < largest] + [largest]


class StepGraphs:
    """Both kinds of graphs of one runner. `run` runs a step of a kind and size that consists of padding."""

    def __init__(
        self, graphs: Graphs, max_num_seqs: int, max_num_batched_tokens: int, run: Callable[[Kind, int], None]
    ) -> None:
        self._graphs = graphs
        self._run = run
        self._sizes: dict[Kind, list[int]] = {"step": ladder(max_num_seqs), "hidden": ladder(max_num_batched_tokens)}
        self._captured: dict[tuple[Kind, int], Replay] = {}
        steps, hidden = ([(kind, size) for size in reversed(sizes)] for kind, sizes in self._sizes.items())
        self._missing = [hidden[0], *steps, *hidden[1:]]

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def give_up(self) -> None:
        self._missing.clear()

    def find(self, kind: Kind, size: int) -> tuple[int, Replay] | None:
        """Return the size of the smallest fitting graph, and the graph; None if none fits or it is not captured."""
        place = bisect.bisect_left(self._sizes[kind], size)
        if place == len(self._sizes[kind]):
            return None
        size = self._sizes[kind][place]
        replay = self._captured.get((kind, size))
        return None if replay is None else (size, replay)

    def capture_next(self) -> None:
        """Capture one more graph, if any is missing, after waiting for all work that was started before."""
        if self._missing:
            kind, size = self._missing.pop(0)
            self._captured[kind, size] = self._graphs.capture(lambda: self._run(kind, size))
