"""A prefill beside running streams takes what the target latency leaves, measured on the steps themselves."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from itertools import count

import pytest

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.costs.measuring import StepCostTracker
from engine.costs.table import MIN_PREFILL_TOKENS, Curve, StepBudget, StepCostTable, StepLoad
from engine.messages import FinishReason
from engine.plan import SchedulerOutput
from engine.simulation.counting import VirtualClock
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import make_request, simulated

TARGET = 0.08
MAX_TOKENS = 512


@dataclass(frozen=True)
class Costs:
    """What a step costs, in seconds."""

    step: float = 0.02
    token: float = 0.0005
    context: float = 0.0  # for each token that a computed one looks back on


class Device:
    """Runs steps in simulated time; `seconds` has how long each of them took."""

    def __init__(self, costs: Costs, table: StepCostTable | None = None) -> None:
        self.costs = costs
        self.hold_up = 0.0  # the next step takes this much longer
        self.slow_steps, self.slowness = 0, 40.0  # so many steps take so many times as long
        self.seconds: list[float] = []
        self._first_tokens = count(100)  # so that no prompt is found in the prefix cache
        clock = VirtualClock(1000.0)
        config = EngineConfig(
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=MAX_TOKENS,
            target_inter_token_latency=TARGET,
        )
        executor = CheckedExecutor(1200, 16, 1000, cost=self._cost, clock=clock, sleep=clock.sleep)
        executor._read = lambda *_: None  # type: ignore[method-assign]  # this is about time, and the prompts are long
        self.core = EngineCore(config, executor, clock=clock, costs=table)

    def _cost(self, plan: SchedulerOutput) -> float:
        looked_back_on = sum(
            num_tokens * self.core.scheduler.requests[request_id].num_computed_tokens
            for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)
        )
        costs = self.costs
        seconds = costs.step + costs.token * plan.total_num_scheduled_tokens + costs.context * looked_back_on
        held_up, self.hold_up = self.hold_up, 0.0
        if self.slow_steps:
            self.slow_steps -= 1
            seconds *= self.slowness
        self.seconds.append(seconds)
        return seconds + held_up

    def stream(self, number: int = 1) -> None:
        """Start streams that decode to the end of the test."""
        for index in range(number):
            self.core.add(make_request([index] * 20, max_tokens=3000))
        for _ in range(5):
            self.core.step()

    def prefill(self, length: int, name: str = "prompt", max_tokens: int = 1) -> tuple[list[int], list[float]]:
        """Return the chunks of a prompt and how long their steps take, decode-only steps left out."""
        self.core.add(make_request([next(self._first_tokens), *range(length - 1)], name, max_tokens=max_tokens))
        chunks: list[int] = []
        first = len(self.seconds)
        while sum(chunks) < length:
            self.core.step()
            plan = simulated(self.core).plans[-1]
            chunks.append(dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)).get(name, 0))
            assert len(chunks) <= 16 or any(chunks[-17:]), "at most 16 steps in a row have no chunk"
        seconds = [each for each, chunk in zip(self.seconds[first:], chunks, strict=True) if chunk]
        return [chunk for chunk in chunks if chunk], seconds

    def busy(self, num_steps: int) -> list[int]:
        """Return the prefill tokens of so many steps while prompts keep coming, decode-only steps left out."""
        chunks: list[int] = []
        while len(chunks) < num_steps:
            if len(self.core.scheduler.requests) < 8:
                self.core.add(make_request([next(self._first_tokens), *range(1500)], max_tokens=1))
            self.core.step()
            if (num_tokens := simulated(self.core).plans[-1].num_prefill_tokens) > 0:
                chunks.append(num_tokens)
        return chunks


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(step=0.001, token=0.0002),
        Costs(step=0.05, token=0.001),
        Costs(step=0.01, token=0.0003, context=3e-7),
    ],
    ids=["even", "quick", "slow", "attention"],
)
@pytest.mark.parametrize("num_streams", [1, 7])
def test_steps_with_streams_and_prefill_stay_near_the_target(costs: Costs, num_streams: int) -> None:
    device = Device(costs)
    device.stream(num_streams)
    device.prefill(1000, "one that is measured")
    chunks, seconds = device.prefill(3000)
    allowed = max(TARGET, 2 * (costs.step + costs.token * num_streams))
    assert max(seconds[1:]) <= 1.25 * allowed
    # And no chunk is smaller than it need be.
    settled = [each for each, chunk in zip(seconds[3:-1], chunks[3:-1], strict=True) if chunk < MAX_TOKENS - 8]
    if settled:
        assert statistics.median(settled) >= 0.75 * allowed


def test_the_first_prefill_beside_a_stream_begins_carefully() -> None:
    device = Device(Costs(token=0.001))
    device.core.add(make_request([1, 2, 3], max_tokens=3000))  # too short to be a measure
    for _ in range(3):
        device.core.step()
    _, seconds = device.prefill(1000)
    assert max(seconds) <= 1.25 * TARGET


def test_without_streams_a_prefill_takes_the_whole_budget() -> None:
    device = Device(Costs(token=0.01))
    chunks, _ = device.prefill(1200)
    assert chunks == [512, 512, 176]
    device.stream()
    assert max(device.prefill(1200, "beside a stream")[0]) < 100


def test_a_quick_device_gives_prefill_the_whole_budget_beside_streams_too() -> None:
    device = Device(Costs(step=0.002, token=0.00001))
    device.stream(2)
    device.prefill(100, "measure")
    assert device.prefill(2000)[0][:3] == [510, 510, 510]


def test_prefill_doubles_a_step_where_decoding_alone_takes_the_whole_target() -> None:
    device = Device(Costs(step=2 * TARGET, token=0.002))
    device.stream()
    device.prefill(500, "measure")
    _, seconds = device.prefill(1500)
    assert 3.5 * TARGET <= statistics.median(seconds) <= max(seconds) <= 4.5 * TARGET


@pytest.mark.parametrize("seed", range(12))
def test_streams_keep_a_sixth_of_their_speed_and_prefill_goes_on(seed: int) -> None:
    """The figures are for the device; the table was measured on it, and may be off by an eighth."""
    rng = random.Random(seed)
    costs = Costs(10 ** rng.uniform(-3, -1.5), rng.uniform(0.0003, 0.002), rng.choice([0.0, 1e-7]))
    num_streams = rng.randint(1, 5)
    device = Device(costs)
    device.stream(num_streams)
    for index in range(3):
        device.prefill(2000, f"measure {index}")
    first, alone = len(device.seconds), costs.step + costs.token * num_streams
    _, with_chunk = device.prefill(3000)
    seconds = device.seconds[first:]
    assert len(seconds) * alone >= 0.15 * sum(seconds), "the streams keep 15 % of their speed"
    assert max(seconds) <= 1.25 * max(TARGET, 2 * alone), "no token waits longer than for one step"
    assert sum(seconds) <= 1.25 * sum(with_chunk), "prefill is a fourth slower at most"


def test_steps_of_decodes_alone_end_where_the_table_knows_no_decodes_or_says_they_cost_nothing() -> None:
    for seconds in (0.0, 1e-9):
        table = StepCostTable.unknown(8, MAX_TOKENS)
        table.prefill = Curve([1, 512], [0.001, 0.512])
        table.decode = Curve([1, 8], [seconds] * 2)
        budget = StepBudget(table, MAX_TOKENS, TARGET)
        for _ in range(20):
            budget.count(budget.prefill_tokens(StepLoad(1, 10), 0))
            for _ in range(16):
                budget.count(0)
            assert not budget.leaves_out_prefill


def test_a_short_prompt_leaves_no_step_of_decodes_alone_behind() -> None:
    device = Device(Costs(step=0.007, token=0.0005))
    device.stream()
    device.prefill(1500, "measure")
    for index in range(20):
        device.core.step()
        assert len(device.prefill(20, f"short {index}")[0]) == 1
        assert simulated(device.core).plans[-2].num_prefill_tokens == 0


@pytest.mark.parametrize(
    "costs",
    [Costs(step=0.03, token=0.0005), Costs(step=0.001, token=0.00005)],
    ids=["decodes take a fifth", "far below the target"],
)
def test_no_step_goes_without_prefill_where_steps_are_not_long(costs: Costs) -> None:
    device = Device(costs)
    device.stream()
    device.prefill(1500, "measure")
    first = len(device.seconds)
    assert len(device.prefill(2000)[0]) == len(device.seconds) - first


def test_prefill_goes_on_however_little_of_it_fits() -> None:
    device = Device(Costs(step=0.01, token=0.02))
    device.stream()
    chunks, _ = device.prefill(200)
    assert set(chunks[:-1]) <= {MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS * 9 // 8}


@pytest.mark.parametrize(
    "after",
    [Costs(step=0.04, token=0.002), Costs(step=0.005, token=0.0001), Costs(step=0.02, token=0.004)],
    ids=["slower", "quicker", "much slower per token"],
)
def test_it_follows_when_costs_change_in_the_middle(after: Costs) -> None:
    device = Device(Costs())
    device.stream(2)
    device.prefill(1000, "before")
    device.costs = after
    device.prefill(1500, "between")
    chunks, seconds = device.prefill(2500, "after")
    assert max(seconds) <= 1.25 * TARGET or max(chunks) == MIN_PREFILL_TOKENS
    for each, chunk in list(zip(seconds, chunks, strict=True))[2:-1]:
        assert each >= 0.75 * TARGET or chunk >= MAX_TOKENS - 8


def test_only_a_step_with_prefill_asks_how_much_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StepLoad] = []
    prefill_tokens = StepBudget.prefill_tokens

    def asks(budget: StepBudget, decodes: StepLoad, start: int) -> int:
        asked.append(decodes)
        return prefill_tokens(budget, decodes, start)

    monkeypatch.setattr(StepBudget, "prefill_tokens", asks)
    device = Device(Costs())
    device.stream(8)  # all running slots
    device.core.add(make_request([99] * 20, "waits"))
    asked.clear()
    for _ in range(10):
        device.core.step()
    assert not asked, "a full queue behind full slots costs steps nothing"
    device.core.finish_request(next(iter(device.core.scheduler.running)), FinishReason.ABORT)
    device.core.step()
    lengths = [request.num_computed_tokens for request in device.core.scheduler.running.values()]
    (decodes,) = asked
    assert decodes == StepLoad(7, sum(lengths[:7])), "what this very step decodes"


def test_one_step_that_was_held_up_is_forgotten_soon() -> None:
    for what in ("decode", "prefill"):
        device = Device(Costs())
        device.stream(2)
        usual, _ = device.prefill(1500, "before")
        device.hold_up = 20.0
        if what == "decode":
            device.core.step()
        chunks, seconds = device.prefill(2000, "after")
        assert max(seconds) <= 1.25 * TARGET
        # No step without prefill came in between to correct the measure: the prefill itself has to.
        assert chunks[-2] >= 0.75 * statistics.median(usual[2:-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_slow", [12, 24, 40])
@pytest.mark.parametrize("when", ["first", "later", "kept"])
def test_a_burst_of_slow_steps_does_not_keep_chunks_small(num_slow: int, when: str) -> None:
    device = Device(Costs(step=0.012, token=0.0004))
    device.slow_steps = num_slow if when == "first" else 0
    device.stream(4)
    if when != "first":
        device.busy(60)
        device.slow_steps = num_slow
    while device.slow_steps:
        device.busy(1)
    if when == "kept":
        device = Device(device.costs, StepCostTable.from_json(device.core.costs.settled().to_json()))
        device.stream(4)
    usual = (TARGET - 0.012) / 0.0004 - 4
    assert statistics.fmean(device.busy(200)[60:]) > 0.85 * usual, "after five seconds at most"


def test_now_and_then_a_chunk_is_larger_than_the_table_recommends() -> None:
    device = Device(Costs(step=0.012, token=0.0004))
    device.stream(4)
    device.busy(100)
    chunks = device.busy(160)
    usual = statistics.median(chunks)
    assert 5 <= sum(1.1 * usual < chunk <= 1.25 * usual for chunk in chunks) <= 12


def test_whatever_the_measures_are_a_prefill_gets_some_and_never_too_much() -> None:
    for seconds in ([0.0] * 9, [0.0, 50.0] * 5, [1e-9] * 9, [1e6, 0.0, 0.0, 1e-12], [0.08] * 9):
        table = StepCostTable.unknown(8, MAX_TOKENS)
        tracker, budget = StepCostTracker(table), StepBudget(table, MAX_TOKENS, TARGET)
        for each in seconds:
            for num_prefill_tokens, num_decode_tokens in ((0, 2), (200, 2), (200, 0), (0, 0), (17, 1), (16, 0)):
                decodes = StepLoad(num_decode_tokens, 100 * num_decode_tokens)
                tracker.observe(decodes._replace(num_prefills=1, num_prefill_tokens=num_prefill_tokens), each)
                assert MIN_PREFILL_TOKENS <= budget.prefill_tokens(decodes, 100) <= MAX_TOKENS
                assert table.seconds_per_prefill_token >= 0.0
