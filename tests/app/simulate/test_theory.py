"""What queueing theory says of one slot with constant steps, whose service times are geometric: near exponential."""

from __future__ import annotations

import math
from random import Random

import pytest

from app.simulate.driver import Outcome
from app.simulate.loads import draw_length
from app.workload.datasets import WorkloadRequest
from tests.app.simulate.helpers import Instant, asked, constant, simulated

STEP = 0.01  # seconds
RATE, MEAN = 12.0, 5.0  # requests per second, and their output tokens


def geometric(number: int, rate: float, mean: float, seed: int = 1) -> list[WorkloadRequest]:
    draw, now, requests = Random(seed), 0.0, []
    for _ in range(number):
        now += draw.expovariate(rate)
        requests.append(asked(now, 1, draw_length(mean, "exponential", draw.random())))
    return requests


def serve(requests: list[WorkloadRequest], slots: int) -> Outcome:
    return simulated(
        requests, Instant(table=constant(STEP)), max_num_seqs=slots, max_queued_requests=2**20, max_queued_tokens=2**31
    )


def waits_by_lindley(requests: list[tuple[float, int]]) -> list[float]:
    """How long each waits for a single server: Lindley's recursion, in which there are no steps, blocks or queues."""
    waits, free = [], 0.0
    for arrival, length in requests:
        waits.append(max(0.0, free - arrival))
        free = max(free, arrival) + length * STEP
    return waits


@pytest.fixture(scope="module")
def one_slot() -> tuple[list[WorkloadRequest], Outcome]:
    requests = geometric(2500, RATE, MEAN)
    return requests, serve(requests, slots=1)


def test_each_waits_as_long_as_lindley_says(one_slot: tuple[list[WorkloadRequest], Outcome]) -> None:
    requests, outcome = one_slot
    waits = [record.ttft - STEP for record in outcome.records]
    arrivals = [(request.arrival or 0.0, request.num_output_tokens) for request in requests]
    assert waits == pytest.approx(waits_by_lindley(arrivals), abs=1e-6)
    span = max(record.end_time for record in outcome.records)
    busy = sum(request.num_output_tokens for request in requests) * STEP
    assert outcome.figures["slot_utilization"] == pytest.approx(busy / span, rel=1e-6)


def test_over_a_long_run_lindley_says_what_the_theory_does() -> None:
    """Four hundred thousand requests, which take Lindley a second: the same that the simulator serves."""
    draw, now, arrivals = Random(1), 0.0, []
    for _ in range(400_000):
        now += draw.expovariate(RATE)
        arrivals.append((now, draw_length(MEAN, "exponential", draw.random())))
    waits = sorted(waits_by_lindley(arrivals))
    load = RATE * MEAN * STEP
    assert sum(length for _, length in arrivals) * STEP / now == pytest.approx(load, rel=0.01)
    # Pollaczek and Khinchine, for lengths that are geometric.
    second = (2 - 1 / MEAN) * MEAN**2 * STEP**2
    assert sum(waits) / len(waits) == pytest.approx(RATE * second / 2 / (1 - load), rel=0.02)
    # Cramer and Lundberg: P(wait > t) is C exp(-decay t) for long t.
    decay, factor = tail(load)
    assert waits[int(0.99 * len(waits))] == pytest.approx(math.log(factor / 0.01) / decay, rel=0.02)


def tail(load: float) -> tuple[float, float]:
    """The decay at which RATE (E exp(decay S) - 1) = decay, and the factor before it."""
    end = 1 / MEAN

    def generating(decay: float) -> float:
        return end * math.exp(decay * STEP) / (1 - (1 - end) * math.exp(decay * STEP))

    low, high = 1e-6, -math.log(1 - end) / STEP * 0.999
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if RATE * (generating(middle) - 1) < middle else (low, middle)
    slope = (generating(low + 1e-6) - generating(low - 1e-6)) / 2e-6
    return low, (1 - load) / (RATE * slope - 1)


def test_littles_law_holds(one_slot: tuple[list[WorkloadRequest], Outcome]) -> None:
    _, outcome = one_slot
    span = outcome.figures["simulated_seconds"]
    changes = sorted([(r.start_time, 1) for r in outcome.records] + [(r.end_time, -1) for r in outcome.records])
    area = number = 0.0
    before = 0.0
    for time, change in changes:
        area += number * (time - before)
        number, before = number + change, time
    mean_time = sum(r.end_time - r.start_time for r in outcome.records) / len(outcome.records)
    assert area / span == pytest.approx(len(outcome.records) / span * mean_time, rel=1e-9)


def test_what_cannot_be_served_queues_up_at_the_difference_of_the_rates() -> None:
    draw, now, arrivals = Random(2), 0.0, []
    for _ in range(400):
        now += draw.expovariate(8.0)
        arrivals.append(now)
    outcome = serve([asked(time, 1, 60) for time in arrivals], slots=4)

    def num_there(time: float) -> int:
        return sum(record.start_time <= time < record.end_time for record in outcome.records)

    # Four slots of 60 steps of 10 ms serve 6.67 a second while somebody waits.
    middle, end = arrivals[199], arrivals[-1]
    assert num_there(end) - num_there(middle) == pytest.approx(200 - 4 / 0.6 * (end - middle), abs=4)
    assert num_there(end) > num_there(middle) + 10


def test_several_slots_serve_as_many_at_once() -> None:
    outcome = serve([asked(0.0, 1, 100, f"r{number}") for number in range(32)], slots=8)
    ends = sorted(record.end_time for record in outcome.records)
    assert ends == pytest.approx([(1 + number // 8) * 100 * STEP for number in range(32)])
