"""What steps cost is measured while nobody wants one, and whoever arrives ends that."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.costs.measuring import MAX_SECONDS
from engine.costs.table import SETTLED, StepCostTable, StepLoad, chunk_keys
from engine.plan import SchedulerOutput
from engine.simulation.counting import VirtualClock
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import assert_nothing_left, make_request, run_to_end

KEY, PROMPT_KEY, ROW = 2e-6, 1e-7, 0.0005


class Device:
    """What its steps cost is known; `kept` are the tables that somebody wanted to keep."""

    def __init__(self, slowness: float = 1.0, costs: StepCostTable | None = None, **options: Any) -> None:
        self.slowness = slowness
        self.kept: list[StepCostTable] = []
        self.computed: dict[str, int] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []
        self.clock = VirtualClock(1000.0)
        self.executor = CheckedExecutor(
            400, 16, 1000, cost=self._cost, clock=self.clock, sleep=self.clock.sleep, max_num_seqs=32
        )
        self.slow_steps = 0  # the first steps that take so much longer
        self.lost_steps = 0  # those during which the thread has no processor for half of the time
        self.executor.cpu_seconds = self._cpu_seconds  # type: ignore[attr-defined]
        self.cpu_time = 0.0
        self.executor._read = lambda *_: None  # type: ignore[method-assign]  # made-up requests share their blocks
        config = EngineConfig(max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=512)
        self.core = EngineCore(
            config, self.executor, costs=costs, keep_costs=self.kept.append, clock=self.clock, **options
        )

    def _cpu_seconds(self) -> float:
        return self.cpu_time

    def _hold_up(self, seconds: float) -> float:
        self.cpu_time += seconds
        if self.slow_steps:
            self.slow_steps -= 1
            self.cpu_time += 39 * seconds
            return 40 * seconds
        if self.lost_steps:
            self.lost_steps -= 1
            return 40 * seconds
        return seconds

    def truth(self, load: StepLoad) -> float:
        tokens = load.num_decodes + load.num_prefill_tokens
        seconds = 0.005 + 0.0002 * tokens + KEY * load.num_decode_keys + PROMPT_KEY * load.num_prefill_keys
        return self.slowness * (seconds + ROW * max(load.num_prefills - 1, 0)) if tokens else 0.0

    def _cost(self, plan: SchedulerOutput) -> float:
        self.plans.append(plan)
        for new in plan.new_requests:
            self.computed[new.request_id] = new.num_computed_tokens
            self.num_prompt_tokens[new.request_id] = new.num_prompt_tokens
        load = [0, 0, 0, 0, 0]
        for name, tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            start = self.computed[name]
            self.computed[name] += tokens
            keys = chunk_keys(start, tokens)
            is_prefill = start < self.num_prompt_tokens[name]
            load = [
                a + b for a, b in zip(load, [0, 0, 1, tokens, keys] if is_prefill else [1, keys, 0, 0, 0], strict=True)
            ]
        seconds = self.truth(StepLoad(*load))
        return self._hold_up(seconds) if seconds else 0.0

    def calibrate(self) -> None:
        while self.core.prepare() and not self.core.has_news:
            pass


def test_a_table_is_measured_in_two_seconds_of_idle_time() -> None:
    device = Device()
    core = device.core
    began = device.clock.now
    while core.prepare() and not core.has_news:
        pass
    assert device.clock.now - began <= MAX_SECONDS + 0.2
    assert device.kept == [core.costs.settled()]
    assert core.report().stats.step_costs == core.costs.to_json()
    assert not core.has_news
    assert not core.prepare(), "that was all"
    for load in (
        StepLoad(1, 100),
        StepLoad(8, 8 * 1000),
        StepLoad(32, 32 * 300),
        StepLoad(0, 0, 1, 100, chunk_keys(0, 100)),
        StepLoad(0, 0, 1, 512, chunk_keys(0, 512)),
        StepLoad(0, 0, 1, 128, chunk_keys(1500, 128)),
        StepLoad(0, 0, 16, 256, 16 * chunk_keys(0, 16)),
        StepLoad(8, 8 * 100, 1, 128, chunk_keys(0, 128)),
        StepLoad(8, 8 * 100, 1, 300, chunk_keys(0, 300)),
    ):
        assert core.costs.cost(load) == pytest.approx(device.truth(load), rel=0.15), load
    assert_nothing_left(core)
    core.scheduler.check_integrity()


def test_a_request_that_arrives_ends_it_at_once_and_finds_everything_as_it_was() -> None:
    device = Device()
    core = device.core
    for _ in range(8):
        assert core.prepare()
    assert not device.executor.known_request_ids
    assert core.scheduler.kv.usage == 0.0
    num_plans = len(device.plans)
    core.add(make_request(range(50), "real", max_tokens=3))
    run_to_end(core)
    assert all(plan.request_ids == ["real"] for plan in device.plans[num_plans:] if plan.request_ids)
    assert not core.prepare()
    assert device.kept, "what was measured is kept"
    assert_nothing_left(core)


def test_of_a_slow_device_nothing_is_measured_that_takes_long() -> None:
    device = Device(slowness=100.0)  # half a second for a step
    while device.core.prepare() and not device.core.has_news:
        pass
    assert device.clock.now - 1000.0 < 3 * MAX_SECONDS
    assert device.core.costs.decode.is_known


def assert_true(device: Device) -> None:
    for load in (
        StepLoad(1, 100),
        StepLoad(32, 32 * 16),
        StepLoad(0, 0, 1, 64, chunk_keys(0, 64)),
        StepLoad(0, 0, 1, 512, chunk_keys(0, 512)),
        StepLoad(8, 8 * 16, 1, 128, chunk_keys(0, 128)),
    ):
        assert device.core.costs.cost(load) == pytest.approx(device.truth(load), rel=0.15), load


@pytest.mark.parametrize("first", [0, 1, 2, 9])
def test_steps_that_were_slow_once_or_twice_are_not_believed(first: int) -> None:
    device = Device()
    for _ in range(first):
        device.core.prepare()
    device.slow_steps = 2
    device.calibrate()
    assert_true(device)
    counts = device.kept[0].decode.counts
    assert set(counts) <= {0, *range(3, 99)}
    assert min(counts[0], counts[-1]) > 0, "no shape was skipped because another took long once"


def test_steps_that_lost_their_processor_are_made_again() -> None:
    device = Device()
    device.lost_steps = 7
    device.calibrate()
    assert_true(device)


def test_of_a_machine_that_is_busy_for_good_steps_cost_what_they_take() -> None:
    device = Device()
    device.lost_steps = 10**6
    device.calibrate()
    device.core.add(make_request(range(50), max_tokens=60))
    run_to_end(device.core)
    assert device.core.costs.cost(StepLoad(1, 80)) == pytest.approx(40 * device.truth(StepLoad(1, 80)), rel=0.2)


def test_a_real_step_that_lost_its_processor_changes_no_cost_but_the_spread() -> None:
    device = Device()
    device.calibrate()
    costs = device.core.costs
    before = costs.decode.seconds, costs.prefill.seconds, costs.mixed.seconds
    assert not any(each.bins for each in costs.decode.spread), "made-up steps are not in the spread"
    device.core.add(make_request(range(50), max_tokens=100))
    device.lost_steps = 6
    for _ in range(6):
        device.core.step()
    assert (costs.decode.seconds, costs.prefill.seconds, costs.mixed.seconds) == before
    assert costs.decode.spread[0].bins == [0] * 20 + [5], "they took 40 times their cost"
    device.slow_steps = 6  # it computes all the time, so that may be the truth
    for _ in range(6):
        device.core.step()
    assert (costs.decode.seconds, costs.prefill.seconds, costs.mixed.seconds) != before


def test_nothing_is_kept_that_was_measured_too_few_times() -> None:
    device = Device()
    device.core.prepare()
    device.core.add(make_request(range(50), max_tokens=1))
    run_to_end(device.core)
    device.core.shutdown()
    assert device.kept == []


def test_the_front_end_is_told_soon_when_much_has_changed() -> None:
    device = Device()
    device.calibrate()
    device.core.add(make_request(range(50), max_tokens=1500))
    told = [device.core.step().stats.step_costs is not None for _ in range(1000)]
    assert sum(told[600:]) <= 2, "where nothing changes it is told now and then"
    device.slowness = 10.0
    told = [device.core.step().stats.step_costs is not None for _ in range(64)]
    assert any(told)


def test_what_is_known_is_not_measured_again() -> None:
    first = Device()
    while first.core.prepare() and not first.core.has_news:
        pass
    second = Device(costs=StepCostTable.from_json(first.kept[0].to_json()))
    assert not second.core.prepare()
    assert second.plans == []
    second.core.shutdown()
    assert second.kept == [second.core.costs.settled()], "as the steps have made it"


def test_a_table_without_costs_of_prompts_is_measured_at_the_next_start() -> None:
    """An engine that ends early keeps what it has measured three times, perhaps of decodes alone."""
    table = StepCostTable.unknown(32, 512)
    table.decode.begin(1, 0.0052)
    table.decode.counts[0] = SETTLED
    device = Device(costs=table)
    device.calibrate()
    prompt = StepLoad(0, 0, 1, 256, chunk_keys(0, 256))
    assert device.core.costs.cost(prompt) == pytest.approx(device.truth(prompt), rel=0.2)


def test_a_device_that_fails_is_left_alone() -> None:
    device = Device()
    device.executor.cost = lambda plan: 1 / 0
    while device.core.prepare() and not device.core.has_news:
        pass
    device.executor.cost = device._cost
    assert device.core.scheduler.kv.usage == 0.0
    device.core.add(make_request(range(50), "real", max_tokens=3))
    assert len(run_to_end(device.core)["real"]) == 3
