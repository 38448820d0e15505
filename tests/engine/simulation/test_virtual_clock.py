"""The engine itself on a virtual clock: hours pass in a moment, and every figure is what the steps cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.errors import StepAbandoned
from engine.executor import StepHandle
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import FinishedRequest
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import ModelRunnerOutput, SchedulerOutput
from engine.simulation.counting import VirtualClock
from tests.engine.helpers import RecordingObserver, assert_nothing_left, byte_level_tokenizer, make_request
from tests.engine.simulated_executor import SimulatedExecutor

VOCABULARY = Vocabulary(byte_level_tokenizer())
STEP, TOKEN = 0.01, 0.0001  # seconds


def cost(plan: SchedulerOutput) -> float:
    return STEP + TOKEN * plan.total_num_scheduled_tokens if plan.request_ids else 0.0


class Timed(RecordingObserver):
    def __init__(self) -> None:
        super().__init__()
        self.first_tokens: list[float] = []
        self.gaps: list[float] = []
        self.whole: list[float] = []

    def on_first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def on_inter_token(self, seconds: float, count: int) -> None:
        self.gaps += [seconds] * count

    def on_request_finished(self, finished: FinishedRequest) -> None:
        super().on_request_finished(finished)
        self.whole.append(finished.e2e_seconds)


class AbandonsItsFirstStep(SimulatedExecutor):
    """As soon as the step's time is over."""

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        handle = super().submit(plan, abandoned)
        return Abandoned(handle) if plan.step == 1 else handle


class Abandoned:
    def __init__(self, handle: StepHandle) -> None:
        self._handle = handle

    def result(self) -> ModelRunnerOutput:
        self._handle.result()
        raise StepAbandoned


class Simulation:
    """An engine and its front end, which requests reach at their `arrival_time`."""

    def __init__(self, depth: int) -> None:
        self.clock = VirtualClock(5000.0)
        executor = SimulatedExecutor(512, 16, 1000, cost=cost, clock=self.clock, sleep=self.clock.sleep)
        config = EngineConfig(max_model_len=512, max_num_seqs=8, pipeline_depth=depth)
        self.core = EngineCore(config, executor, clock=self.clock)
        self.observer = Timed()
        self.outputs = OutputProcessor(VOCABULARY, self.observer, self.clock)

    def run(self, requests: list[EngineCoreRequest]) -> None:
        waiting = deque(sorted(requests, key=lambda request: request.arrival_time))
        streams = []
        while waiting or self.core.has_work:
            if not self.core.has_work:
                self.clock.sleep(waiting[0].arrival_time - self.clock.now)
            while waiting and waiting[0].arrival_time <= self.clock.now:
                request = waiting.popleft()
                streams.append(self.outputs.open([request], [request]))
                self.core.add(request)
            self.outputs.process(self.core.step())
            for stream in [each for each in streams if not each.num_unfinished]:
                streams.remove(stream)
                self.outputs.close(stream)
        assert_nothing_left(self.core)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_hour_of_requests_costs_what_its_steps_cost(depth: int) -> None:
    simulation = Simulation(depth)
    start = simulation.clock.now
    simulation.run(
        [
            replace(make_request([number % 100] * 32, max_tokens=10), arrival_time=start + 30.0 * number)
            for number in range(120)
        ]
    )
    observer = simulation.observer
    assert len(observer.whole) == 120
    # The first time a prompt is seen all of it is computed; later its first block is found.
    prefills = [STEP + TOKEN * (32 if number < 100 else 16) for number in range(120)]
    assert observer.first_tokens == pytest.approx(prefills, abs=1e-6)
    assert observer.gaps == pytest.approx([STEP + TOKEN] * 120 * 9, abs=1e-6)
    assert observer.whole == pytest.approx([first + 9 * (STEP + TOKEN) for first in prefills], abs=1e-6)
    assert simulation.clock.now == pytest.approx(start + 30.0 * 119 + observer.whole[-1])
    assert simulation.core.heartbeat.last_progress == simulation.clock.now


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_is_timed_and_ended_by_the_virtual_clock_alike_each_time(depth: int) -> None:
    told = []
    for _ in range(2):
        simulation = Simulation(depth)
        start = simulation.clock.now
        requests = [
            replace(
                make_request([number] * 200, f"r{number}", max_tokens=20),
                arrival_time=start + 0.003 * number,
                first_token_deadline=start + 0.5 if number % 2 else None,
            )
            for number in range(24)
        ]
        simulation.run(requests)
        steps = simulation.core.snapshot().steps
        # No time passes between two steps while there is something to do.
        for step, following in pairwise(steps):
            assert following.time == pytest.approx(step.time + step.seconds)
        observer = simulation.observer
        reasons = [finished.reason for finished in observer.finished]
        assert 0 < reasons.count(FinishReason.TIMEOUT) < 12
        assert reasons.count(FinishReason.LENGTH) == 24 - reasons.count(FinishReason.TIMEOUT)
        told.append((observer.finished, observer.first_tokens, observer.gaps, observer.whole, steps))
    assert told[0] == told[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_time_of_an_abandoned_step_is_not_that_of_the_one_planned_on_top(depth: int) -> None:
    clock = VirtualClock(5000.0)
    config = EngineConfig(max_model_len=512, max_num_seqs=8, pipeline_depth=depth)
    executor = AbandonsItsFirstStep(512, 16, 1000, cost=cost, clock=clock, sleep=clock.sleep)
    core = EngineCore(config, executor, clock=clock)
    core.add(make_request([1] * 32, "left", max_tokens=10))
    core.step()
    core.finish_request("left", FinishReason.ABORT)
    core.add(make_request([2] * 32, "stays", max_tokens=3))
    while core.has_work:
        core.step()
    steps = core.snapshot().steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1)), "each that was handed on has its number"
    for step, following in pairwise(steps):
        assert following.time == pytest.approx(step.time + step.seconds)
