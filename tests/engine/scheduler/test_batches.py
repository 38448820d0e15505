"""Rows of batches run when nothing else does, and no other request is slower, later or preempted because of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core.core import EngineCore
from engine.messages import BATCH_PRECEDENCE, EngineCoreRequest
from engine.scheduler.request_table import LONGEST_HOLD
from tests.engine.helpers import make_core, make_request, simulated


def row(name: str, num_tokens: int = 3, **fields: Any) -> EngineCoreRequest:
    request = make_request([ord(name[-1])] * num_tokens, name, **{"max_tokens": 30, **fields})
    return msgspec.structs.replace(request, precedence=BATCH_PRECEDENCE)


def plans(core: EngineCore) -> list[dict[str, int]]:
    return [dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)) for plan in simulated(core).plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_steps_of_a_request_are_those_that_it_has_alone(depth: int) -> None:
    def steps(*rows: EngineCoreRequest) -> list[dict[str, int]]:
        core = make_core(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=8, pipeline_depth=depth)
        for each in rows:
            core.add(each)
        for _ in range(3):
            core.step()
        simulated(core).plans.clear()
        core.add(make_request(list(range(20)), "direct", max_tokens=10))
        while "direct" in core.scheduler.requests:
            core.step()
            core.scheduler.check_integrity()
        found = [plan for plan in plans(core) if "direct" in plan]
        while core.has_work:
            core.step()
        assert {each.request_id for each in rows} <= {name for plan in plans(core) for name in plan}
        return found

    assert steps(row("row 1"), row("row 2"), row("row 3", 12)) == steps()


@pytest.mark.parametrize("scarce", [{"max_num_seqs": 3}, {"num_blocks": 16}])
def test_a_request_takes_slots_and_blocks_of_rows_at_once(scarce: dict[str, Any]) -> None:
    core = make_core(**{"max_num_seqs": 8, "num_blocks": 128, "block_size": 4, "max_model_len": 60, **scarce})
    for number in range(3):
        core.add(row(f"row {number}", 12, priority=-(2**31 - 1)))
    for _ in range(8):
        core.step()
    assert len(core.scheduler.running) == 3
    core.add(make_request(list(range(30)), "direct", max_tokens=5))
    core.step()
    assert "direct" in core.scheduler.running
    core.scheduler.check_integrity()
    ended: set[str] = set()
    while core.has_work:
        ended |= {output.request_id for output in core.step().outputs if output.finish_reason}
    assert ended == {"direct", "row 0", "row 1", "row 2"}


def test_a_row_that_is_held_keeps_its_blocks() -> None:
    core = make_core(max_num_seqs=4, num_blocks=64)
    core.add(row("row"))
    for _ in range(5):
        core.step()
    core.add(make_request([1], "direct", max_tokens=5))
    while "direct" in core.scheduler.requests:
        assert core.step().stats.num_preemptions == 0
    core.step()
    assert plans(core)[-1] == {"row": 1}


def test_an_engine_that_is_never_idle_runs_one_row_at_a_time_after_a_minute() -> None:
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 0.1
        return seconds

    core = make_core(max_num_seqs=4, num_blocks=64, clock=clock)
    core.add(make_request([1], "direct 0", max_tokens=20))
    for number in range(3):
        core.add(row(f"row {number}", max_tokens=20))
    released_at: list[float] = []
    for number in range(1, 400):
        direct = [name for name in core.scheduler.requests if name.startswith("direct")]
        if len(direct) < 2:
            core.add(make_request([1], f"direct {number}", max_tokens=20))
        core.step()
        core.scheduler.check_integrity()
        running = [name for name in plans(core)[-1] if name.startswith("row")]
        assert len(running) <= 1
        released_at += [seconds] if running else []
    assert released_at[0] > LONGEST_HOLD
    assert not any(name.startswith("row") for name in core.scheduler.requests), "all rows are answered"
