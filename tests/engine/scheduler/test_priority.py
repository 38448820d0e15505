"""A priority orders its tenant's own requests. Across tenants only a precedence counts, which no client can choose."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.scheduler.waiting_queue import OUTPUT_TOKEN_COST
from tests.engine.helpers import make_core, make_request, simulated
from tests.engine.scheduler.test_fairness import first_seats, request_of, run_alone, seats_held


def keep_waiting(core: EngineCore, tenant: str, number: int, **fields: Any) -> None:
    """So many requests of the tenant wait, or run."""
    while core.scheduler.shares.num_living[tenant] < number:
        core.add(request_of(tenant, **{"max_tokens": 20, **fields}))


# --- one tenant


def test_a_tenants_own_requests_start_by_priority_and_then_by_arrival() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_request([1], "running", max_tokens=10))
    core.step()
    for name, priority in (("d", 0), ("f", 7), ("b", -3), ("e", 0), ("a", -1000), ("c", -3)):
        core.add(make_request([ord(name)], name, max_tokens=2, priority=priority))
    assert [request.request_id for request in core.scheduler.waiting] == list("abcdef")
    simulated(core).plans.clear()
    while core.has_work:
        core.step()
    assert [new.request_id for plan in simulated(core).plans for new in plan.new_requests] == list("abcdef")


def test_preempted_requests_of_a_tenant_resume_in_order_of_arrival() -> None:
    core = make_core(max_num_seqs=4)
    for name in "abcd":
        core.add(make_request([ord(name)], name, max_tokens=30))
    core.step()
    for name in "bdac":
        core.scheduler._table.put_back(core.scheduler.running[name], 0.0)
    core.add(make_request([1], "e", max_tokens=30))
    assert [request.request_id for request in core.scheduler.waiting] == list("abcde")


def test_of_one_tenant_the_least_urgent_gives_way_when_blocks_run_out() -> None:
    core = make_core(num_blocks=16, block_size=4, max_model_len=60, max_num_seqs=3)
    for name, priority in (("patient", 5), ("usual", 0), ("urgent", -5)):
        core.add(make_request([ord(letter) for letter in name[:4]], name, max_tokens=40, priority=priority))
    while not core.step().stats.num_preemptions:
        pass
    assert set(core.scheduler.running) == {"usual", "urgent"}


# --- two tenants


def test_who_calls_everything_urgent_starves_nobody() -> None:
    """As with six connections that ask again and again: each tenant has more work than running slots all the time."""
    core = make_core(max_num_seqs=2)
    finished: Counter[str] = Counter()
    owner: dict[str, str] = {}
    for _ in range(400):
        keep_waiting(core, "urgent", 6, priority=-1000)
        keep_waiting(core, "usual", 6)
        owner |= {request_id: request.tenant for request_id, request in core.scheduler.requests.items()}
        finished.update(owner[output.request_id] for output in core.step().outputs if output.finish_reason)
    assert sum(finished.values()) > 20
    assert abs(finished["urgent"] - finished["usual"]) <= 2


def test_who_calls_everything_urgent_gives_up_seats_as_others_do() -> None:
    core = make_core(max_num_seqs=4)
    for _ in range(10):
        core.add(request_of("urgent", max_tokens=100, priority=-1000))
    core.step()
    for _ in range(4):
        core.add(request_of("usual", max_tokens=100, priority=1000))
    core.step()
    core.step()
    assert seats_held(core) == {"urgent": 2, "usual": 2}


def test_who_calls_everything_urgent_keeps_no_more_memory_than_others() -> None:
    """Room for about four long requests, and each tenant has four: whoever has more than half gives way."""
    core = make_core(num_blocks=32, block_size=4, max_model_len=80, max_num_seqs=8)
    generated: Counter[str] = Counter()
    owner: dict[str, str] = {}
    for _ in range(1500):
        keep_waiting(core, "urgent", 4, priority=-1000, max_tokens=60)
        keep_waiting(core, "usual", 4, max_tokens=60)
        owner |= {request_id: request.tenant for request_id, request in core.scheduler.requests.items()}
        for output in core.step().outputs:
            generated[owner[output.request_id]] += len(output.new_token_ids)
    assert generated["usual"] > 0.7 * generated["urgent"]
    assert generated["urgent"] > 0.7 * generated["usual"]


def test_a_newcomer_keeps_its_memory_beside_a_flood_that_calls_itself_urgent() -> None:
    core = make_core(num_blocks=32, block_size=4, max_model_len=80, max_num_seqs=8)
    for _ in range(20):
        keep_waiting(core, "flood", 12, priority=-1000, max_tokens=60)
        core.step()
    newcomer = request_of("small", prompt=30, max_tokens=40, request_id="newcomer")
    core.add(newcomer)
    for num_steps in count():
        keep_waiting(core, "flood", 12, priority=-1000, max_tokens=60)
        if any(output.request_id == "newcomer" and output.finish_reason for output in core.step().outputs):
            break
        assert num_steps < 200


# --- the right to go first


def test_precedence_comes_before_the_tenants_shares() -> None:
    core = make_core(max_num_seqs=1)
    run_alone(core, "busy", requests=1)
    core.add(request_of("quiet", max_tokens=30))
    core.step()
    for tenant, rank in (("quiet", 1), ("quiet", 0), ("busy", -1), ("busy", 1), ("busy", -1)):
        core.add(request_of(tenant, max_tokens=2, priority=rank, precedence=rank))
    assert first_seats(core, 3) == ["busy", "busy", "quiet"]


def test_nobody_gives_up_a_seat_for_a_request_of_less_precedence() -> None:
    core = make_core(max_num_seqs=2)
    for _ in range(4):
        core.add(request_of("first", max_tokens=20, precedence=-1))
    core.step()
    core.add(request_of("patient", max_tokens=20, priority=-1000))
    while len(core.scheduler.waiting) > 1:
        core.step()
        assert not seats_held(core)["patient"]


@pytest.mark.parametrize("order", [("first", "last"), ("last", "first")])
def test_of_two_tenants_the_one_of_less_precedence_gives_way_when_blocks_run_out(order: tuple[str, str]) -> None:
    core = make_core(num_blocks=16, block_size=4, max_model_len=60, max_num_seqs=2)
    precedence = {"first": -1, "last": 0}
    for tenant in order:
        request = request_of(tenant, max_tokens=50, priority=-1000, precedence=precedence[tenant], request_id=tenant)
        core.add(request)
    while len(core.scheduler.running) != 1:
        core.step()
    assert list(core.scheduler.running) == ["first"]


# --- any mix


@pytest.mark.slow
@pytest.mark.seconds
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.integers(1, 5),
    kinds=st.lists(st.sampled_from(["none", "urgent", "patient", "any"]), min_size=2, max_size=4),
)
def test_whatever_priorities_tenants_give_those_who_always_have_work_are_served_alike(
    seed: int, num_slots: int, kinds: list[str]
) -> None:
    """What two tenants of equal weight were served differs by what the running slots can hold, for each of the two, and
    no more however long it lasts. And of each tenant's requests the first by priority and arrival starts first, but for
    shorter ones of the same priority beside the prefill of a long prompt."""
    draw = random.Random(seed)
    priority_of = {
        "none": lambda: 0,
        "urgent": lambda: -1000,
        "patient": lambda: 1000,
        "any": lambda: draw.choice([-(2**31) + 1, -1000, -1, 0, 0, 1, 2**31 - 1]),
    }
    max_prompt, max_output = 12, 12
    bound = 2 * num_slots * (max_prompt + OUTPUT_TOKEN_COST * max_output)
    core = make_core(max_num_seqs=num_slots, max_num_batched_tokens=draw.choice([8, 32]), num_blocks=256)
    tenants = {f"tenant-{number}": priority_of[kind] for number, kind in enumerate(kinds)}
    owner: dict[str, str] = {}
    served: dict[str, float] = dict.fromkeys(tenants, 0.0)
    for _ in range(500):
        for tenant, priority in tenants.items():
            while core.scheduler.shares.num_living[tenant] < 8:
                request = request_of(
                    tenant,
                    prompt=draw.randint(1, max_prompt),
                    max_tokens=draw.randint(1, max_output),
                    priority=priority(),
                )
                owner[request.request_id] = tenant
                core.add(request)
        lines = defaultdict(list)
        for living in core.scheduler.requests.values():
            if not living.num_preemptions and living.request_id not in core.scheduler.running:
                lines[living.tenant].append(living)
        for output in core.step().outputs:
            served[owner[output.request_id]] += OUTPUT_TOKEN_COST * len(output.new_token_ids)
        plan = simulated(core).plans.pop()
        for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            served[owner[request_id]] += num_tokens if num_tokens > 1 else 0
        started = {new.request_id for new in plan.new_requests}
        for line in lines.values():
            line.sort(key=lambda request: (request.message.priority, request.sequence_number))
            assert not any(
                later.request_id in started
                and earlier.request_id not in started
                and (
                    later.message.priority != earlier.message.priority
                    or later.num_prompt_tokens >= earlier.num_prompt_tokens
                )
                for earlier, later in pairwise(line)
            )
        assert max(served.values()) - min(served.values()) <= bound
    assert max(served.values()) > bound  # so that the bound could have been broken
