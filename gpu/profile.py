"""Profiles of a worker's steps: the calls of a model that the C++ library computes, or what torch's profiler sees. A
profile records from its creation until `stop`, which is called once.

Events have Chrome's trace format, with times in microseconds of `time.monotonic()`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ProfileTooLarge
from engine.executor import MAX_PROFILE_BYTES
from gpu.runner.host_runner import ModelRunner
from gpu.runner.runner import LanguageModel, ModelInputs

Event = dict[str, Any]
TRACK = 3
P = ParamSpec("P")
T = TypeVar("T")


class TimedModel:
    """A `LanguageModel` that notes how long each call takes."""

    def __init__(self, model: LanguageModel) -> None:
        self.events: list[Event] = []
        self.model = model

    def forward(self, inputs: ModelInputs, cancellation_check: Callable[[], None] | None = None) -> NDArray[np.float32]:
        return self._timed("forward", len(inputs.input_ids), self.model.forward, inputs, cancellation_check)

    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._timed("compute_logits", len(hidden), self.model.compute_logits, hidden)

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return self._timed("most_likely", len(hidden), self.model.most_likely, hidden)

    def draw(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return self._timed("draw", len(logits), self.model.draw, logits, *parameters)

    def _timed(self, name: str, rows: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            span = {"ts": began * 1e6, "dur": (time.monotonic() - began) * 1e6}
            self.events.append({"name": name, "ph": "X", "pid": 0, "tid": TRACK, "args": {"rows": rows}, **span})


class HostProfile:
    """The profile of a runner with a model that the C++ library computes."""

    def __init__(self, runner: ModelRunner, model: LanguageModel) -> None:
        self._runner = runner
        self._timed = TimedModel(model)
        runner.swap_model(self._timed)

    def stop(self) -> list[Event]:
        self._runner.swap_model(self._timed.model)
        name = {"name": "thread_name", "ph": "M", "pid": 0, "tid": TRACK, "args": {"name": "model"}}
        return [name, *self._timed.events]


class TorchProfile:
    """The profile of all that torch computes on this thread and its devices."""

    def __init__(self) -> None:
        from torch.profiler import profile

        self._profile = profile()  # records everything that the profiler supports here
        self._profile.start()

    def stop(self) -> list[Event]:
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profile.export_chrome_trace(path)
            if (size := os.path.getsize(path)) > MAX_PROFILE_BYTES:  # it would take gigabytes as objects
                raise ProfileTooLarge(f"torch's profile takes {size} bytes")
            with open(path, "rb") as file:
                trace = json.load(file)
        # Its times are wall-clock times, relative to a base.
        shift = trace.get("baseTimeNanoseconds", 0) / 1e3 - (time.time() - time.monotonic()) * 1e6
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += shift
        return list(trace["traceEvents"])
