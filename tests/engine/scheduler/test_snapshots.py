"""A snapshot says why each request waits, and where whose blocks lie."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.commands import GetSnapshot
from engine.core.core import EngineCore
from engine.plan import owned
from engine.scheduler.block_pool import MOST_CELLS
from engine.snapshot import WaitsFor
from tests.engine.helpers import make_core, make_request


def reasons(core: EngineCore) -> dict[str, WaitsFor | None]:
    return {each.request_id: each.waits_for for each in core.snapshot().waiting}


def test_whoever_runs_waits_for_nothing() -> None:
    core = make_core()
    core.add(make_request(range(9)))
    core.step()
    assert [each.waits_for for each in core.snapshot().running] == [None]


def test_without_a_running_slot_a_request_waits_for_one() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_request(range(9), "a"))
    core.add(make_request(range(9, 18), "b"))
    core.step()
    assert reasons(core) == {"b": WaitsFor.SLOT}


def test_a_tenant_waits_at_its_share_and_at_its_limit() -> None:
    core = make_core(max_num_seqs=4)
    for number in range(6):
        core.add(make_request(range(9 * number, 9 * number + 9), f"a{number}", tenant="a"))
    for number in range(10, 13):
        request = make_request(range(9 * number, 9 * number + 9), f"b{number}", tenant="b")
        request.tenant_max_running = 1
        core.add(request)
    for _ in range(4):
        core.step()
    running = Counter(each.tenant for each in core.snapshot().running)
    assert running == {"a": 3, "b": 1}
    assert reasons(core) == {
        **dict.fromkeys(("a3", "a4", "a5"), WaitsFor.SHARE),
        **dict.fromkeys(("b11", "b12"), WaitsFor.LIMIT),
    }
    tenants = {each.tenant: each for each in core.snapshot().tenants}
    assert (tenants["a"].num_running, tenants["a"].num_waiting, tenants["a"].max_running) == (3, 3, 0)
    assert (tenants["b"].num_running, tenants["b"].num_waiting, tenants["b"].max_running) == (1, 2, 1)


def test_a_request_waits_for_blocks_and_so_do_those_behind_it() -> None:
    core = make_core(num_blocks=33, max_num_batched_tokens=128)
    core.add(make_request(range(100), "a", max_tokens=20))
    core.step()
    core.add(make_request(range(100, 200), "b", max_tokens=20))
    core.add(make_request(range(200, 204), "c", max_tokens=20))
    core.step()
    assert reasons(core) == {"b": WaitsFor.BLOCKS, "c": WaitsFor.BLOCKS}


def test_a_request_waits_for_the_prefix_that_another_computes() -> None:
    core = make_core(max_num_batched_tokens=16)
    core.add(make_request(range(60), "a"))
    core.add(make_request(range(60), "b"))
    core.step()
    assert reasons(core) == {"b": WaitsFor.COMPUTED}


def test_a_request_that_nothing_but_the_budget_holds_back_starts_with_the_next_step() -> None:
    core = make_core(max_num_batched_tokens=16)
    core.add(make_request(range(60), "a"))
    core.add(make_request(range(100, 160), "b"))
    core.step()
    assert reasons(core) == {"b": WaitsFor.STEP}


def test_looking_changes_nothing() -> None:
    ends = []
    for looks in (False, True):
        core = make_core(num_blocks=34, max_num_seqs=3, max_num_batched_tokens=16)
        for number in range(6):
            core.add(make_request(range(30), f"r{number}", tenant=f"t{number % 2}", max_tokens=50))
        told = []
        while core.has_work:
            if looks:
                core.snapshot(GetSnapshot(most_requests=2))
            told.append([(output.request_id, output.new_token_ids) for output in core.step().outputs])
        ends.append(told)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_the_map_shows_each_block_by_state_and_group(windows: tuple[int | None, ...]) -> None:
    core = make_core(windows=windows, num_blocks=96)
    core.add(make_request(range(25), "a", max_tokens=2))
    while core.has_work:
        core.step()
    for name in ("b", "c"):
        core.add(make_request(range(25), name, max_tokens=20))
    for _ in range(3):
        core.step()
    blocks = core.snapshot().blocks
    assert (len(blocks.map), blocks.map_stride) == (96, 1)
    expected: list[str] = []
    tables = [request.block_ids for request in core.scheduler.running.values()]
    owners = Counter(block_id for table in tables for block_id in owned(table))
    for group in range(len(windows)):
        mine = {block_id for table in tables for block_id in owned(table[group :: len(windows)])}
        expected += [("ab" if owners[block_id] == 1 else "AB")[group] for block_id in mine]
    expected += "-" * blocks.num_cached + "." * blocks.num_free
    assert sorted(blocks.map) == sorted(expected)
    assert "A" in blocks.map


def test_the_map_of_many_blocks_shows_some_of_them() -> None:
    core = make_core(num_blocks=3 * MOST_CELLS + 1)
    blocks = core.snapshot().blocks
    assert blocks.map_stride == 4
    assert len(blocks.map) == -(-(3 * MOST_CELLS + 1) // 4)
