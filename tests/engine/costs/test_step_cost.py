"""The table of what steps cost: never negative, never less for more, the same after a trip through JSON."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs.table import Curve, StepCostTable, StepLoad, chunk_keys

MAX_SEQS, MAX_TOKENS = 32, 512

costs = st.floats(min_value=0.0, max_value=100.0, allow_subnormal=False)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=8)))
    seconds = sorted(draw(st.lists(costs, min_size=len(sizes), max_size=len(sizes))))
    counts = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    return Curve(sizes, seconds, counts)


tables = st.builds(
    StepCostTable,
    decode=curves(),
    prefill=curves(),
    mixed=curves(),
    decode_key=costs,
    prefill_key=costs,
    prefill_row=costs,
)
loads = st.builds(StepLoad, *(st.integers(0, 5000) for _ in range(5)))


@given(tables, loads, st.integers(0, 4), st.integers(0, 300))
@settings(deadline=None)
def test_more_work_never_costs_less_and_none_is_negative(
    table: StepCostTable, load: StepLoad, field: int, more: int
) -> None:
    grown = load._replace(**{load._fields[field]: load[field] + more})
    assert 0.0 <= table.cost(load) <= table.cost(grown) * (1 + 1e-12)
    assert math.isfinite(table.cost(grown))


@given(tables, loads)
@settings(deadline=None)
def test_a_table_is_the_same_after_a_trip_through_json(table: StepCostTable, load: StepLoad) -> None:
    again = StepCostTable.from_json(table.to_json())
    assert again == table
    assert again.cost(load) == table.cost(load)


def test_a_table_can_be_written_by_hand() -> None:
    text = b"""{"decode": {"sizes": [1, 32], "seconds": [0.01, 0.041]}, "prefill": {"sizes": [512], "seconds": [0.1]},
                "mixed": {"sizes": [1, 512], "seconds": [0.0, 0.0511]}, "decode_key": 1e-6}"""
    table = StepCostTable.from_json(text)
    assert table.cost(StepLoad(1)) == 0.01
    assert table.cost(StepLoad(3, 600)) == pytest.approx(0.012 + 0.0006)
    assert table.cost(StepLoad(0, 0, 1, 512, chunk_keys(0, 512))) == 0.1
    assert table.cost(StepLoad(0, 0, 1, 256)) == 0.1, "what is smaller than the smallest measured costs as much"
    assert table.cost(StepLoad(0, 0, 1, 1024)) == pytest.approx(0.2)
    assert table.cost(StepLoad(10, 0, 1, 256)) == pytest.approx(0.1), "no less than the prefill alone"
    assert table.cost(StepLoad(31, 0, 1, 256)) == pytest.approx(0.1)
    assert table.cost(StepLoad(64, 0, 1, 512)) == pytest.approx(2 * 0.041 + 0.0511)


def test_what_is_not_told_of_a_prefill_is_deduced() -> None:
    table = StepCostTable.from_json(
        b"""{"decode": {"sizes": [1, 8], "seconds": [1, 8]}, "prefill": {"sizes": [1], "seconds": [0.5]},
             "mixed": {"sizes": [1], "seconds": [0.1]}, "decode_key": 0.001, "prefill_key": 0.0001}"""
    )
    assert table.cost(StepLoad(4, 100)) == 4 + 0.1
    assert table.cost(StepLoad(0, 0, 1, 10, 55)) == 5 + 55e-4
    assert table.cost(StepLoad(3, 300, 1, 10, 1000)) == pytest.approx(max(3 + 300e-3 + 1.0, 5.0) + 1000e-4)
    assert table.cost(StepLoad(3, 1245, 1, 10, 55)) == pytest.approx(max(3 + 1245e-3 + 1.0, 5.0) + 55e-4)


@given(curves(), st.integers(1, 5000), costs)
@settings(deadline=None)
def test_no_size_costs_more_than_its_share_of_a_smaller_one_where_one_of_them_was_measured(
    curve: Curve, size: int, decode_seconds: float
) -> None:
    curve.counts = [3] * len(curve.sizes)
    before, seconds = curve.seconds[:], curve.at(size)
    curve.share_out(size, decode_seconds)
    again = Curve(curve.sizes, curve.seconds, curve.counts)  # which raises for what is no curve
    for other, after, earlier in zip(again.sizes, again.seconds, before, strict=True):
        share = (seconds + decode_seconds) * other / size - decode_seconds
        limit = min(earlier, share) if other >= size else max(earlier, share)
        assert after == pytest.approx(limit, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"decode": {"sizes": [2, 1], "seconds": [1, 2]}}',
        b'{"decode": {"sizes": [1, 2], "seconds": [2, 1]}}',
        b'{"decode": {"sizes": [1, 2], "seconds": [1]}}',
        b'{"decode": {"sizes": [], "seconds": []}}',
        b'{"decode": {"sizes": [1], "seconds": [-1]}}',
        b'{"decode": {"sizes": [1], "seconds": [1e999]}}',
        b'{"decode": {"sizes": [1], "seconds": [1], "counts": [-1]}}',
    ],
)
def test_what_is_no_table_is_refused(text: bytes) -> None:
    known = StepCostTable.unknown(MAX_SEQS, MAX_TOKENS).to_json()
    if b"decode" in text:  # all else of it is right
        text = text[:-1] + b"," + known[known.index(b'"prefill"') :]
    with pytest.raises(ValueError, match="not a table"):
        StepCostTable.from_json(text)


def test_of_an_engine_that_has_made_no_step_nothing_is_known() -> None:
    table = StepCostTable.unknown(MAX_SEQS, MAX_TOKENS)
    assert not table.is_known
    assert table.decode.sizes == [1, 2, 4, 8, 16, 32]
    assert table.prefill.sizes[-1] == MAX_TOKENS
    assert table.cost(StepLoad(31, 10**6, 1, 513, 10**6)) == 0.0


def test_a_token_of_a_prompt_costs_its_part_of_the_largest_step_that_was_measured() -> None:
    table = StepCostTable.unknown(8, 64)
    assert table.seconds_per_prompt_token == 0.0
    flat = Curve([1, 16, 64], [0.4, 0.4, 9.0], [1, 1, 0])  # noise hides what a token adds
    table.prefill = flat
    assert table.seconds_per_prompt_token == pytest.approx(0.4 / 16)


def test_what_was_measured_too_few_times_is_not_kept() -> None:
    table = StepCostTable.unknown(8, 64)
    table.decode = Curve([1, 8, 16], [0.1, 0.2, 0.3], [3, 2, 7])
    table.mixed.begin(16, 0.4)
    kept = table.settled()
    assert (kept.decode.counts, kept.decode.seconds) == ([3, 0, 7], [0.1, 0.2, 0.3])
    assert kept.is_known
    assert not kept.mixed.is_known
    assert table.decode.counts == [3, 2, 7], "the table in use goes on as it was"


def test_a_curve_whose_shares_are_rounded_does_not_fall() -> None:
    """Else the table could not be read, and the front end would lose what came with it."""
    curve = Curve([1003, 1351, 1455], [0.7976513076383016] * 3, [3] * 3)
    for size in range(1, 3000):
        for decode_seconds in (0.0, 0.1, 0.7976513076383016, 3.3):
            curve.share_out(size, decode_seconds)
            assert curve.seconds == sorted(curve.seconds)
