"""The table follows the steps: whatever it was told before, and whatever holds up some of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs.measuring import StepCostTracker
from engine.costs.table import StepCostTable, StepLoad, chunk_keys
from tests.engine.costs.test_step_cost import MAX_SEQS, MAX_TOKENS, loads


def truth(load: StepLoad, speed: float = 1.0) -> float:
    """A device that reads its weights in 10 ms, once for all."""
    tokens = load.num_decodes + load.num_prefill_tokens
    compute = 0.0004 * load.num_decodes + 0.0003 * load.num_prefill_tokens
    attention = 1e-6 * load.num_decode_keys + 2e-7 * load.num_prefill_keys
    return speed * ((0.01 if tokens else 0.0) + compute + attention)


def some_loads(seed: int, number: int) -> list[StepLoad]:
    """As a server has them: streams at all lengths, and prompts in chunks beside some of them."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        decodes = draw.choice([0, 1, 3, 8, 20, 32])
        tokens = draw.choice([0, 0, 16, 50, 130, 300, 480]) or (0 if decodes else 64)
        keys = sum(draw.randrange(20, 1500) for _ in range(decodes))
        found.append(StepLoad(decodes, keys, tokens > 0, tokens, chunk_keys(draw.choice([0, 0, 500, 1500]), tokens)))
    return found


def error(table: StepCostTable, speed: float = 1.0) -> float:
    """Of typical loads, the median of how far it is off."""
    off = sorted(abs(table.cost(load) / truth(load, speed) - 1) for load in some_loads(99, 200))
    return off[len(off) // 2]


def observe_all(tracker: StepCostTracker, seed: int, number: int, speed: float = 1.0, held_up: float = 0.0) -> None:
    draw = random.Random(seed)
    for load in some_loads(seed, number):
        seconds = truth(load, speed) * draw.uniform(0.95, 1.05)
        tracker.observe(load, seconds * draw.choice([5, 50, 1000]) if draw.random() < held_up else seconds)


@pytest.mark.parametrize("held_up", [0.0, 0.05])
def test_it_learns_what_steps_cost_and_follows_when_that_changes(held_up: float) -> None:
    tracker = StepCostTracker(StepCostTable.unknown(MAX_SEQS, MAX_TOKENS))
    observe_all(tracker, 1, 1500, held_up=held_up)
    assert error(tracker.table) < 0.06
    for speed in (3.0, 0.4):
        before = error(tracker.table, speed)
        observe_all(tracker, 2, 1500, speed, held_up)
        assert error(tracker.table, speed) < 0.08 < before


def test_steps_that_were_held_up_move_nothing() -> None:
    tracker = StepCostTracker(StepCostTable.unknown(MAX_SEQS, MAX_TOKENS))
    for load in some_loads(1, 600):
        tracker.observe(load, truth(load))
    before = StepCostTable.from_json(tracker.table.to_json())
    tracker.observe(StepLoad(8, 800), 100.0)
    tracker.observe(StepLoad(0, 0, 1, 300, chunk_keys(0, 300)), 100.0)
    tracker.observe(StepLoad(8, 800, 1, 130, chunk_keys(0, 130)), 100.0)
    for load in some_loads(5, 50):
        assert tracker.table.cost(load) == pytest.approx(before.cost(load), rel=0.05)


def test_what_was_measured_once_and_held_up_then_is_corrected_by_the_next_steps() -> None:
    tracker = StepCostTracker(StepCostTable.unknown(MAX_SEQS, MAX_TOKENS))
    load = StepLoad(0, 0, 1, 64, chunk_keys(0, 64))
    tracker.observe(load, 100.0)
    for _ in range(5):
        tracker.observe(load, truth(load))
    assert tracker.table.cost(load) == pytest.approx(truth(load), rel=0.01)


@given(st.lists(st.tuples(loads, st.floats(0, 1e6)), max_size=60), loads, st.integers(0, 4))
@settings(deadline=None)
def test_whatever_steps_take_the_table_stays_one(
    steps: list[tuple[StepLoad, float]], load: StepLoad, field: int
) -> None:
    tracker = StepCostTracker(StepCostTable.unknown(MAX_SEQS, MAX_TOKENS))
    for each, seconds in steps:
        tracker.observe(each, seconds)
    again = StepCostTable.from_json(tracker.table.to_json())
    assert again == tracker.table
    grown = load._replace(**{load._fields[field]: load[field] + 50})
    assert 0.0 <= again.cost(load) <= again.cost(grown) * (1 + 1e-9)


def test_what_costs_nothing_by_the_table_is_learned_all_the_same() -> None:
    curve = '{"sizes": [1, 32], "seconds": [0, 0], "counts": [3, 3]}'
    table = StepCostTable.from_json(f'{{"decode": {curve}, "prefill": {curve}, "mixed": {curve}}}'.encode())
    tracker = StepCostTracker(table)
    for load in some_loads(1, 2000):
        tracker.observe(load, truth(load))
    assert table.cost(StepLoad(32, 20_000)) == pytest.approx(truth(StepLoad(32, 20_000)), rel=0.5)
