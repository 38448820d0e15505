"""What the simulator's tests share: a table, and short ways to a simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from app.config.settings import Settings
from app.simulate.driver import Outcome, simulate
from app.simulate.machine import Machine
from app.workload.datasets import Piece, WorkloadRequest
from engine.costs.table import Curve, StepCostTable, StepLoad

TABLE = StepCostTable(
    decode=Curve([1, 8, 64], [0.007, 0.010, 0.035]),
    prefill=Curve([1, 64, 512], [0.006, 0.015, 0.080]),
    mixed=Curve([1, 64, 512], [0.002, 0.012, 0.078]),
    decode_key=1e-8,
    prefill_key=2e-8,
)


def spread_table(sigma: float = 0.2) -> StepCostTable:
    """The table, with steps that took a log-normal number of times their cost."""
    table, draw = StepCostTable.from_json(TABLE.to_json()), Random(0)
    for load in (StepLoad(1), StepLoad(8), StepLoad(0, 0, 1, 64), StepLoad(8, 0, 1, 64)):
        for _ in range(500):
            table.note(load, table.cost(load) * draw.lognormvariate(0, sigma))
    return table


class Instant(Machine):
    """A machine whose clients are as near as can be."""

    def inbound(self, num_tokens: int) -> float:
        return 0.0

    @property
    def outbound(self) -> float:
        return 0.0


def constant(seconds: float) -> StepCostTable:
    """Every step takes as long."""
    size = 2**20
    return StepCostTable(
        decode=Curve([1, size], [seconds] * 2),
        prefill=Curve([1, size], [seconds] * 2),
        mixed=Curve([1, size], [0.0] * 2),
    )


def asked(arrival: float | None, inputs: int, outputs: int, name: str | None = None, **more: Any) -> WorkloadRequest:
    return WorkloadRequest((Piece(name or f"at {arrival}", inputs),), outputs, arrival=arrival, **more)


def simulated(requests: list[WorkloadRequest], machine: Machine | None = None, **settings: Any) -> Outcome:
    return simulate(requests, machine or Machine(table=TABLE), Settings(**settings))


def smaller(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, **changes)
