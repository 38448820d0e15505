"""Tenants get their shares of all engines together, and no more than their limits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.commands import AddRequests, ChargeTenants
from engine.messages import EngineCoreRequest
from engine.routing.tenants import FleetShares, TenantLimits
from engine.scheduler.waiting_queue import OUTPUT_TOKEN_COST
from tests.engine.helpers import make_core, make_request


def request_of(
    tenant: str, number: int, *, weight: float = 1.0, limit: int = 0, priority: int = 0
) -> EngineCoreRequest:
    request = make_request([number % 7, 1, 2], f"{tenant}-{number}", tenant=tenant, max_tokens=8, priority=priority)
    return msgspec.structs.replace(request, tenant_weight=weight, tenant_max_running=limit)


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (0.5, 1 / 3)])
def test_who_asks_one_engine_gets_its_share_of_both(weight: float, share: float) -> None:
    """One tenant floods two engines, the other only the first: its share is of what both give."""
    cores = [make_core(max_num_seqs=2) for _ in range(2)]
    shares, served = FleetShares(2), {"a": 0.0, "b": 0.0}
    living: list[dict[str, EngineCoreRequest]] = [{}, {}]
    number = 0
    for turn in range(1500):
        for index, core in enumerate(cores):
            for tenant in ("a", "b")[: 2 - index]:
                while sum(each.tenant == tenant for each in living[index].values()) < 6:
                    number += 1
                    request = request_of(tenant, number, weight=weight if tenant == "b" else 1.0)
                    living[index][request.request_id] = request
                    core.carry_out(AddRequests.of([request]))
            for output in core.step().outputs:
                request = living[index][output.request_id]
                cost = OUTPUT_TOKEN_COST * len(output.new_token_ids)
                shares.charge(index, request, cost)
                served[request.tenant] += cost if turn > 300 else 0
                if output.finish_reason is not None:
                    del living[index][output.request_id]
        if turn % 10 == 9:
            for core, elsewhere in zip(cores, shares.take(), strict=True):
                if elsewhere:
                    core.carry_out(ChargeTenants(elsewhere))
    assert served["b"] / sum(served.values()) == pytest.approx(share, abs=0.06)


def test_nothing_is_told_of_a_tenant_that_is_alone() -> None:
    shares = FleetShares(2)
    shares.charge(0, request_of("a", 1), 5.0)
    assert shares.take() == [{}, {}]
    shares.charge(0, request_of("a", 1, weight=2.0), 5.0)
    shares.charge(1, request_of("b", 1), 3.0)
    assert shares.take() == [{"b": 3.0}, {"a": 2.5}]
    assert shares.take() == [{}, {}]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 2), st.integers(0, 9)), max_size=60)
)
@settings(deadline=None)
def test_limits_hold_and_nothing_is_lost(arrivals: list[tuple[str, int, int, int]]) -> None:
    """Tenant a may run two choices at once, b three, c as many as it likes."""
    limits, most = TenantLimits(), {"a": 2, "b": 3, "c": 0}
    running: list[tuple[str, list[str]]] = []
    expected: set[str] = set()
    given_out: set[str] = set()

    def start(tenant: str) -> None:
        while (prompt := limits.next(tenant)) is not None:
            running.append((tenant, [each.request_id for each in prompt.choices]))
            given_out.update(running[-1][1])
            of_tenant = [ids for owner, ids in running if owner == tenant and ids]
            assert not most[tenant] or len(of_tenant) == 1 or sum(map(len, of_tenant)) <= most[tenant]

    for number, (tenant, size, priority, what) in enumerate(arrivals):
        choices = [request_of(tenant, 10 * number + i, limit=most[tenant], priority=priority) for i in range(size)]
        limits.hold(AddRequests([1], choices))
        expected |= {each.request_id for each in choices}
        start(tenant)
        if what < 4 and running:
            owner, ids = running[what % len(running)]
            while ids:
                ids.pop()
                limits.end(owner)
            start(owner)
        elif what == 9 and limits.drop(choices[0].request_id):
            expected.discard(choices[0].request_id)
            start(tenant)
    for owner, ids in running:  # which grows meanwhile
        while ids:
            ids.pop()
            limits.end(owner)
        start(owner)
    assert given_out == expected
    assert not limits.num_held
    assert not limits.tenants
    assert not limits._under_way


def test_who_asks_and_leaves_again_while_held_leaves_nothing() -> None:
    limits = TenantLimits()
    for number in range(101):
        limits.hold(AddRequests([1], [request_of("a", number, limit=1)]))
        if not number:
            assert limits.next("a") is not None
        elif number % 10:
            assert limits.drop(f"a-{number}")
            assert len(limits._held["a"]) <= 2 * limits.num_held
    limits.end("a")
    following = limits.next("a")
    assert following is not None
    assert following.choices[0].request_id == "a-10"


def test_many_choices_of_a_prompt_are_looked_at_once_for_those_that_are_late() -> None:
    class Counted(list[EngineCoreRequest]):
        num_looks = 0

        def __iter__(self) -> Iterator[EngineCoreRequest]:
            self.num_looks += 1
            return super().__iter__()

    limits = TenantLimits()
    choices = Counted(request_of("a", number) for number in range(20))
    for number, choice in enumerate(choices):
        choice.deadline = float(number)
    limits.hold(AddRequests([1], choices))
    choices.num_looks = 0
    assert list(limits.late(9.0)) == [f"a-{number}" for number in range(10)]
    assert choices.num_looks == 1


def test_the_best_priority_is_next() -> None:
    limits = TenantLimits()
    for number, priority in enumerate((5, 5, 0)):
        limits.hold(AddRequests([1], [request_of("a", number, limit=1, priority=priority)]))
    order = []
    while (prompt := limits.next("a")) is not None:
        order.append(prompt.choices[0].request_id)
        limits.end("a")
    assert order == ["a-2", "a-0", "a-1"]
