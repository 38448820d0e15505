"""The interactive simulator: the three lessons, what changes while it runs, and that nothing is left to chance."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.simulate.driver import MAX_MODEL_LEN, PRESETS, Parameters, Session
from engine.simulation.simulation import WORK_PER_REQUEST
from engine.snapshot import EngineSnapshot


def run(session: Session, until: float) -> list[EngineSnapshot]:
    """In pieces, as somebody who watches would have it."""
    snapshots = []
    while session.now < until:
        session.advance(until, max_steps=60)
        snapshots.append(session.core.snapshot())
    return snapshots


def test_three_a_second_on_eight_slots_are_comfortable() -> None:
    session = Session(PRESETS["comfortable"])
    session.advance(200.0, max_steps=10**6)
    kpis = session.kpis()
    assert kpis["utilization"] == pytest.approx(3 * 40 * 0.015 / 8, rel=0.1)
    assert kpis["ttft_p99"] < 3 * 0.015, "the rest of a step, a step, and seldom another"
    assert kpis["little"] == pytest.approx(kpis["num_in_system"], rel=0.01)


def test_eight_a_second_on_four_slots_grow_without_bound() -> None:
    session = Session(PRESETS["overloaded"])
    session.advance(60.0, max_steps=10**6)
    waiting = session.kpis()["num_waiting"]
    session.advance(120.0, max_steps=10**6)
    kpis = session.kpis()
    assert kpis["utilization"] > 0.99
    # What comes less what four slots serve: every 0.6 seconds four.
    assert (kpis["num_waiting"] - waiting) / 60 == pytest.approx(8 - 4 / 0.6, rel=0.4)


def test_two_a_second_on_one_slot_hurt_the_last_percent() -> None:
    session = Session(PRESETS["one slot"])
    session.advance(150.0, max_steps=10**6)
    kpis = session.kpis()
    assert kpis["utilization"] == pytest.approx(2 * 24 * 0.015, rel=0.1)
    assert kpis["ttft_p99"] > 5 * kpis["ttft_p50"]
    assert kpis["little"] == pytest.approx(kpis["num_in_system"], rel=0.05)


def test_the_same_parameters_changes_and_seed_give_the_same_simulation() -> None:
    def watched() -> tuple[list[EngineSnapshot], object]:
        session = Session(Parameters(admission=True, shared_prefix_len=100, seed=7))
        snapshots = run(session, 5.0)
        session.change(rate=20.0, step_seconds=0.03)
        snapshots += run(session, 10.0)
        session.change(max_num_seqs=2, output_len=80.0, burstiness=0.3)
        snapshots += run(session, 15.0)
        return snapshots, session.kpis()

    first = watched()
    assert first == watched()
    steps = {step.step: step for snapshot in first[0] for step in snapshot.steps}
    assert sorted(steps) == list(range(1, len(steps) + 1)), "each is told of"
    assert all(step.num_requests <= 8 for step in steps.values())
    assert [step.num_requests for step in steps.values()][-1] == 2
    assert all(later.time >= earlier.time for earlier, later in pairwise(steps.values()))


def test_a_change_of_the_rate_counts_from_then_on() -> None:
    session = Session(Parameters(rate=0.01))
    session.advance(1.0)
    session.change(rate=100.0)
    session.advance(3.0)
    assert 150 < session.kpis()["num_sent"] < 250


def test_advance_is_bounded_by_its_steps() -> None:
    session = Session(PRESETS["overloaded"])
    session.advance(10**9, max_steps=100)
    assert session.simulation.num_steps == 100


@pytest.mark.parametrize(
    "change", [{"rate": 0}, {"max_num_seqs": 10**6}, {"rte": 3}, {"seed": 4}, {"step_seconds": None}]
)
def test_what_cannot_be_set_is_refused(change: dict[str, float]) -> None:
    session = Session(Parameters())
    with pytest.raises(ValueError, match=next(iter(change))):
        session.change(**change)


@pytest.mark.parametrize("num_blocks", [64, 100])
def test_whatever_is_asked_fits(num_blocks: int) -> None:
    session = Session(
        Parameters(input_len=8000, output_len=4000, shared_prefix_len=8000, num_blocks=num_blocks, rate=5)
    )
    session.advance(30.0, max_steps=2000)
    assert session.kpis()["num_ended"]
    assert not [each.error for each in session.simulation.ended if each.error]


CROWD = Parameters(rate=1000, step_seconds=10, admission=True, input_len=8192, shared_prefix_len=8192, num_blocks=2**12)


def test_advance_is_bounded_by_its_work_however_long_a_step_is() -> None:
    """A thousand requests a second, nearly all of which are refused, come in steps of ten seconds."""
    session = Session(CROWD)
    for number in range(1, 6):
        session.advance(1e6, max_steps=100, max_work=50_000)
        assert session.simulation.work <= number * (50_000 + MAX_MODEL_LEN + 2 * WORK_PER_REQUEST)
    assert session.simulation.num_steps <= 1


def test_slices_of_work_come_to_the_same() -> None:
    sliced, whole = Session(PRESETS["overloaded"]), Session(PRESETS["overloaded"])
    while sliced.now < 3.0:
        sliced.advance(3.0, max_work=1)
    whole.advance(3.0)
    assert sliced.core.snapshot() == whole.core.snapshot()
    assert sliced.simulation.ended == whole.simulation.ended


@pytest.mark.slow
def test_what_a_session_keeps_is_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.simulate.driver.KEPT_TOKENS", 3000)
    session = Session(Parameters(rate=50, max_num_seqs=64, output_len=400, input_len=1))
    for _ in range(30):
        session.advance(1e6, max_steps=100)
        simulation = session.simulation
        records = [*simulation.ended, *simulation.open.values()]
        assert simulation.kept_tokens == sum(len(each.token_times) for each in records)
        assert simulation.kept_tokens <= 3000 or not simulation.ended
        assert session.kept_tokens > simulation.kept_tokens + session.load.open_tokens
    assert simulation.num_ended > len(simulation.ended)
    assert session.kpis()["ttft_p50"] >= 0
