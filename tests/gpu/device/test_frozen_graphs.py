"""Steps replayed as a card replays them: the very launches of a capture, with its tensors and numbers, and no Python.

The graphs of other tests run the step's Python anew. Here a number that was read while the graph was captured stays
what it was, and memory that a capture has taken holds nothing at the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor

from engine.plan import SchedulerOutput
from gpu.device.graphs import Replay
from gpu.kernels.dispatch import interpreted
from tests.gpu.device_runners import Again, make_executor
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request

NOTHING = 77777  # what integers hold that nobody has written


def storages(values: Any) -> dict[int, torch.Tensor]:
    tensors = [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


class Recording(TorchDispatchMode):
    """Record launches, each as a function that repeats it, and the memory that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Callable[[], object]] = []
        self.taken: dict[int, torch.Tensor] = {}

    def launch(self, executor: GridExecutor, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        def start() -> None:
            with _disable_current_modes():  # what the interpreter computes with is none of the step's
                GRID(executor, *args, **keywords)

        start()
        self.again.append(start)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero"), "a capture may not wait"
        result = func(*args, **given)
        before, made = storages((args, given)), storages(result)
        if name.endswith("_") and not name.startswith("_"):
            self.again.append(lambda: func(*args, **given))
        elif new := {at: tensor for at, tensor in made.items() if at not in before}:
            self.taken |= new
            assert isinstance(result, torch.Tensor) or not name.startswith("empty")
            if not name.startswith("empty"):
                self.again.append(lambda: self._write(result, func(*args, **given)))
        return result

    @staticmethod
    def _write(places: Any, values: Any) -> None:
        for place, value in zip(tree_flatten(places)[0], tree_flatten(values)[0], strict=True):
            place.copy_(value)


GRID = GridExecutor.__call__


class Frozen(Again):
    """Graphs that replay what they recorded, over memory that holds nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        recording = Recording()
        with self._monkeypatch.context() as patch, recording:
            patch.setattr(GridExecutor, "__call__", lambda executor, *args, **kw: recording.launch(executor, args, kw))
            run()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            with torch.inference_mode():
                for tensor in recording.taken.values():
                    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    nothing = NOTHING if tensor.element_size() > 2 else 77
                    whole.fill_(float("nan") if tensor.is_floating_point() else nothing)
                for start in recording.again:
                    start()

        return replay


def plans() -> list[SchedulerOutput]:
    """Prompts, mixed steps, and decodes of one to four requests."""
    everyone = [
        new_request(f"r{i}", range(i, i + 5), block_ids=list(range(4 * i, 4 * i + 4)), temperature=0.0)
        for i in range(4)
    ]
    names = [request.request_id for request in everyone]
    return [
        plan_of({"r0": 5, "r1": 3}, new=everyone[:2], going_on=["r1"]),
        plan_of({"r0": 1, "r1": 2, "r2": 5}, new=[everyone[2]]),
        plan_of(dict.fromkeys(names[:3], 1)),
        plan_of(dict.fromkeys(names[:3], 1)),
        plan_of({"r0": 1, "r1": 1, "r2": 1, "r3": 5}, new=[everyone[3]]),
        *[plan_of(dict.fromkeys(names, 1)) for _ in range(3)],
        plan_of({"r1": 1, "r3": 1}, removed=["r0", "r2"]),
        plan_of({"r3": 1}, removed=["r1"]),
        plan_of({"r3": 1}),
    ]


@pytest.mark.storm
def test_replays_without_python_over_memory_that_holds_nothing_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = make_executor("host")
    expected = [host.submit(plan).result().sampled_token_ids for plan in plans()]
    graphs = Frozen(monkeypatch)
    executor = make_executor("device", graphs)
    with interpreted():
        while executor.runner.prepare():
            pass
        found, in_flight = [], []
        for plan in plans():
            in_flight.append(executor.submit(plan))
            if len(in_flight) == 2:
                found.append(in_flight.pop(0).result().sampled_token_ids)
        found += [step.result().sampled_token_ids for step in in_flight]
    assert found == expected
    assert graphs.num_replayed == len(plans())
