"""The spread of step costs: what it counts, forgets and keeps, and what is drawn from it."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs.table import SETTLED, SPREAD_BOUNDS, Curve, StepCostTable, StepLoad
from engine.simulation.counting import ENOUGH, DrawnCosts
from tests.engine.costs.test_step_cost import loads, tables

STREAMS = StepLoad(8, 800)


def known(counts: int = SETTLED) -> StepCostTable:
    """A table whose decodes take 10 ms."""
    curves = (Curve([1, 8, 64], [0.01] * 3, [counts] * 3) for _ in range(3))
    decode, prefill, mixed = curves
    return StepCostTable(decode=decode, prefill=prefill, mixed=mixed)


@given(tables, st.lists(st.tuples(loads, st.floats(0, 1e9)), max_size=40))
@settings(deadline=None, max_examples=50)
def test_whatever_steps_take_the_spread_survives_json_and_moves_no_cost(
    table: StepCostTable, steps: list[tuple[StepLoad, float]]
) -> None:
    before = [table.cost(load) for load, _ in steps]
    for load, seconds in steps:
        table.note(load, seconds)
    assert [table.cost(load) for load, _ in steps] == before
    assert StepCostTable.from_json(table.to_json()) == table
    assert StepCostTable.from_json(table.settled().to_json()).decode.spread == table.decode.spread


def test_each_step_counts_at_its_size_in_the_bin_of_its_ratio() -> None:
    table = known()
    for ratio in (0.01, 1.001, 1.01, 1.4, 1000.0):
        table.note(STREAMS, 0.01 * ratio)
    table.note(StepLoad(0, 0, 1, 64, 10), 0.01)
    table.note(StepLoad(1, 5, 1, 1, 10), 0.02)
    middle = SPREAD_BOUNDS.index(0.0)
    bins = table.decode.spread[1].bins
    assert (bins[0], bins[middle], bins[SPREAD_BOUNDS.index(0.3)], bins[-1], sum(bins)) == (1, 2, 1, 1, 5)
    assert [sum(each.bins) for each in table.decode.spread] == [0, 5, 0]
    assert [sum(each.bins) for each in table.prefill.spread] == [0, 0, 1]
    assert [sum(each.bins) for each in table.mixed.spread] == [1, 0, 0]


def test_a_size_without_a_believed_cost_has_no_spread() -> None:
    table = known(SETTLED - 1)
    table.note(STREAMS, 0.02)
    assert not any(each.bins for each in table.decode.spread)


def test_old_steps_are_forgotten() -> None:
    table = known()
    for _ in range(5000):
        table.note(STREAMS, 0.03)
    for _ in range(12_000):
        table.note(STREAMS, 0.01)
    bins = table.decode.spread[1].bins
    assert sum(bins) < 1000, "however long it runs, a table stays small"
    assert bins[SPREAD_BOUNDS.index(0.0)] == sum(bins)
    assert len(table.to_json()) < 4000


def test_a_tail_keeps_its_share_while_old_steps_are_forgotten() -> None:
    table, draw = known(), random.Random(0)
    tails = []
    for number in range(20_000):
        table.note(STREAMS, 0.01 * (draw.uniform(1.3, 5.0) if draw.random() < 0.02 else draw.lognormvariate(0, 0.05)))
        if number % 500 == 499:
            bins = table.decode.spread[1].bins
            tails.append(sum(bins[SPREAD_BOUNDS.index(0.2) :]) / sum(bins))
    assert np.mean(tails) == pytest.approx(0.02, rel=0.15)


def test_a_table_of_an_earlier_version_is_read_and_has_no_spread() -> None:
    curve = '{"sizes":[1,8],"seconds":[0.01,0.02],"counts":[3,4]}'
    table = StepCostTable.from_json(f'{{"decode":{curve},"prefill":{curve},"mixed":{curve}}}'.encode())
    assert (table.measured_at, table.machine_load) == (0.0, None)
    costs = DrawnCosts(table, seed=0)
    assert not costs.has_spread
    assert costs(StepLoad(8)) == 0.02


RIGHT = {"bins": [1] * 21, "load": [1, 2, 0, 0, 0], "cost": 0.01}


@pytest.mark.parametrize(
    "spread",
    [
        *(
            [RIGHT],
            [RIGHT, RIGHT, {}],
            [{}, {"bins": [1] * 21}],
            [{}, {"load": [1] * 5}],
            [{}, {"x": 1}],
            [None, None],
            "no",
        ),
        *([{}, RIGHT | {"bins": bins}] for bins in ([1] * 20, [0] * 21, [-1, 5] + [1] * 19, [2**40] * 21, [0.5] * 21)),
        *([{}, RIGHT | {"load": load}] for load in ([1], [1, 2, -3, 4, 5], [1e300] * 5)),
        *([{}, RIGHT | {"cost": cost}] for cost in (-1, 1e300, "1")),
    ],
)
def test_what_is_no_spread_is_refused(spread: object) -> None:
    table = json.loads(StepCostTable.unknown(2, 8).to_json())
    assert table["decode"]["spread"] == [{}, {}]
    table["decode"]["spread"] = [{}, RIGHT]
    assert StepCostTable.from_json(json.dumps(table).encode()).decode.spread[1].cost == 0.01
    table["decode"]["spread"] = spread
    with pytest.raises(ValueError, match="not a table"):
        StepCostTable.from_json(json.dumps(table).encode())


@pytest.mark.parametrize("when", [-1.0, 1e300])
def test_what_is_no_time_of_a_measure_is_refused(when: float) -> None:
    table = json.loads(StepCostTable.unknown(2, 8).to_json()) | {"measured_at": when}
    with pytest.raises(ValueError, match="measured_at must be"):
        StepCostTable.from_json(json.dumps(table).encode())


@given(tables, st.lists(loads, max_size=30), st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_without_a_spread_steps_take_exactly_their_cost(table: StepCostTable, steps: list[StepLoad], seed: int) -> None:
    costs = DrawnCosts(table, seed)
    assert [costs(load) for load in steps] == [table.cost(load) for load in steps]
    assert costs.seconds == pytest.approx(sum(map(table.cost, steps)))


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_drawn_steps_have_the_percentiles_of_the_measured_ones(sigma: float) -> None:
    table, draw = known(), random.Random(sigma)
    measured = [0.01 * draw.lognormvariate(0, sigma) * draw.choice([1] * 30 + [2.5]) for _ in range(999)]
    for seconds in measured:
        table.note(STREAMS, seconds)
    costs = DrawnCosts(table, seed=1)
    drawn = [costs(STREAMS) for _ in range(20_000)]
    for percent in (1, 10, 50, 90, 99):
        assert np.percentile(drawn, percent) == pytest.approx(np.percentile(measured, percent), rel=0.12)
    assert np.mean(drawn) == pytest.approx(np.mean(measured), rel=0.02)


def test_what_is_drawn_does_not_move_with_the_table() -> None:
    """A cost is a middle value that follows the latest steps. What is drawn are the steps of a longer time."""
    table, draw = known(), random.Random(0)
    for _ in range(300):
        table.note(STREAMS, 0.01 * draw.uniform(0.9, 1.1))
        table.note(StepLoad(9, 900), 0.01 * draw.uniform(0.9, 1.1))
    table.decode.seconds = [0.004, 0.004, 0.02]
    costs = DrawnCosts(table, seed=0)
    assert np.mean([costs(STREAMS) for _ in range(2000)]) == pytest.approx(0.01, rel=0.05)
    for _ in range(1500):
        table.note(STREAMS, 0.004 * draw.uniform(0.9, 1.1))
    costs = DrawnCosts(table, seed=0)
    assert np.mean([costs(STREAMS) for _ in range(2000)]) == pytest.approx(0.004, rel=0.2), "they are forgotten"


def test_equal_seeds_draw_the_same_and_others_do_not() -> None:
    table, draw = known(), random.Random(0)
    for _ in range(500):
        table.note(STREAMS, 0.01 * draw.lognormvariate(0, 0.3))
    first, second, other = (
        [costs(STREAMS) for _ in range(50)] for costs in (DrawnCosts(table, seed) for seed in (1, 1, 2))
    )
    assert first == second != other


def test_a_size_of_few_steps_has_the_spread_of_its_curve() -> None:
    table = known()
    for _ in range(ENOUGH):
        table.note(StepLoad(64), 0.02)
    table.note(StepLoad(1), 0.0101)
    costs = DrawnCosts(table, seed=0)
    few = [costs(StepLoad(1)) for _ in range(200)]
    assert np.median(few) == pytest.approx(0.02, rel=0.15)
    many = [costs(StepLoad(64)) for _ in range(200)]
    assert min(many) > 0.0164, "a size with enough steps has its own"
    table.note(StepLoad(0, 0, 1, 8), 1.0)
    prefill = StepLoad(0, 0, 1, 8)
    assert DrawnCosts(table, seed=0)(prefill) == table.cost(prefill), "one step is no spread"


def test_the_time_of_sizes_that_were_never_measured_is_known() -> None:
    table = known()
    table.decode.counts = [3, 3, 0]
    costs = DrawnCosts(table, seed=0)
    for load in (StepLoad(1), StepLoad(8), StepLoad(50), StepLoad(64), StepLoad(1, 1, 1, 64), StepLoad(0, 0, 1, 500)):
        costs(load)
    assert costs.unmeasured["decode"][0] == pytest.approx(2 * 0.01)
    assert costs.unmeasured["prefill"][0] == pytest.approx(0.01 * 500 / 64)
    assert [largest for _, largest in costs.unmeasured.values()] == [64, 500]
    assert costs.unmeasured.keys() == {"decode", "prefill"}
    assert math.isclose(costs.seconds, 4 * 0.01 + table.cost(StepLoad(1, 1, 1, 64)) + 0.01 * 500 / 64)
