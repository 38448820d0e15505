"""A device with stages, each at work on another plan: how little they wait for each other, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.plan import ModelRunnerOutput, SchedulerOutput
from engine.simulation.counting import VirtualClock
from tests.engine.helpers import make_request
from tests.engine.queueing_executor import QueuedStep, QueueingExecutor

STEP_SECONDS, TOKEN_SECONDS = 0.010, 0.0002  # of a whole step, divided among the stages
HOST_SECONDS = 0.0005  # between two steps, for what the host does


@dataclass
class StagedStep:
    """A handle whose result is there when the last stage is done."""

    step: QueuedStep
    ends: float
    clock: VirtualClock

    def result(self) -> ModelRunnerOutput:
        self.clock.now = max(self.clock.now, self.ends)
        return self.step.result()


class StagedExecutor(QueueingExecutor):
    """Every stage takes its plans in order, each when the stage before has done it."""

    def __init__(self, num_stages: int, clock: VirtualClock, **options: Any) -> None:
        super().__init__(4096, 16, 1000, max_num_batched_tokens=512, **options)
        self.busy = 0.0  # seconds, of all stages together
        self.virtual_clock = clock
        self._free = [0.0] * num_stages

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> Any:
        step = super().submit(plan, abandoned)
        self.virtual_clock.sleep(HOST_SECONDS)
        seconds = STEP_SECONDS + TOKEN_SECONDS * plan.total_num_scheduled_tokens if plan.request_ids else 0.0
        ends = self.virtual_clock.now
        for stage, free in enumerate(self._free):
            ends = self._free[stage] = max(ends, free) + seconds / len(self._free)
            self.busy += seconds / len(self._free)
        return StagedStep(step, ends, self.virtual_clock)


def bubble(num_stages: int, num_requests: int, prompt: int, answer: int) -> float:
    """The share of their time in which stages have nothing to do."""
    clock = VirtualClock()
    executor = StagedExecutor(num_stages, clock)
    config = EngineConfig(max_model_len=4096, pipeline_depth=num_stages, num_stages=num_stages)
    core = EngineCore(config, executor, learns_costs=False, clock=clock)
    for number in range(num_requests):
        core.add(make_request([number, *range(prompt)], max_tokens=answer, ignore_eos=True))
    while core.has_work:
        core.step()
    return 1 - executor.busy / (clock.now * num_stages)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_streams_keep_every_stage_at_work(num_stages: int) -> None:
    assert bubble(num_stages, num_requests=32, prompt=16, answer=100) < 0.15


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_chunks_of_one_long_prompt_do(num_stages: int) -> None:
    """It waits for no token, so a chunk goes into a stage as soon as the one before has left it."""
    assert bubble(num_stages, num_requests=1, prompt=4000, answer=1) < (0.15 if num_stages == 2 else 0.6)


def test_one_stream_alone_cannot() -> None:
    assert bubble(2, num_requests=1, prompt=16, answer=100) > 0.45
