"""A tenant that floods the engine takes its share of it, and nobody else's."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import combinations, count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.core.core import EngineCore
from engine.messages import EngineCoreOutput, EngineCoreRequest
from engine.scheduler.waiting_queue import OUTPUT_TOKEN_COST, TenantShares
from tests.engine.helpers import (
    assert_nothing_left,
    batches,
    make_core,
    make_request,
    run_to_end,
    simulated,
    tokens_of,
)
from tests.engine.simulated_tokens import expected_output

VOCAB_SIZE = 1000
_prompts = count(1)


def request_of(
    tenant: str,
    *,
    prompt: int = 4,
    max_tokens: int,
    weight: float = 1.0,
    max_running: int = 0,
    priority: int = 0,
    precedence: int = 0,
    request_id: str | None = None,
) -> EngineCoreRequest:
    """A request whose prompt nobody else has."""
    start = next(_prompts)
    token_ids = [start % VOCAB_SIZE, *(start * position % VOCAB_SIZE for position in range(1, prompt))]
    request = make_request(token_ids, request_id, tenant=tenant, max_tokens=max_tokens, priority=priority)
    return replace(request, tenant_weight=weight, tenant_max_running=max_running, precedence=precedence)


def flooded(tenant: str = "flood", *, requests: int = 30, max_tokens: int = 100, **options: Any) -> EngineCore:
    """A core whose running slots are full of one tenant's long generations, with more of them waiting."""
    core = make_core(**options)
    for _ in range(requests):
        core.add(request_of(tenant, max_tokens=max_tokens))
    for _ in range(10):
        core.step()
    return core


def steps_to_first_token(core: EngineCore, request_id: str, limit: int = 1000) -> int:
    for number in range(1, limit + 1):
        if any(output.request_id == request_id and output.new_token_ids for output in core.step().outputs):
            core.scheduler.check_integrity()
            return number
    raise AssertionError(f"no token within {limit} steps")


def seats_held(core: EngineCore) -> Counter[str]:
    return Counter(request.tenant for request in core.scheduler.running.values())


def expected_tokens(core: EngineCore, request: EngineCoreRequest) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling, vocab_size=VOCAB_SIZE, max_model_len=core.config.max_model_len
    ).token_ids


# --- a flood


def test_a_newcomer_gets_its_first_token_at_once_beside_a_flood() -> None:
    core = flooded(max_num_seqs=4)
    assert seats_held(core) == {"flood": 4}
    core.add(request_of("small", max_tokens=5, request_id="newcomer"))
    assert steps_to_first_token(core, "newcomer") <= 2


def test_a_newcomer_gets_blocks_that_a_flood_has_filled() -> None:
    core = flooded(max_num_seqs=8, num_blocks=32, block_size=4, max_model_len=128, max_tokens=24)
    while core.scheduler.kv.pool.num_free > 1:
        core.step()
    core.add(request_of("small", prompt=20, max_tokens=5, request_id="newcomer"))
    assert steps_to_first_token(core, "newcomer") <= 2


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_of_more_tenants_than_running_slots_nobody_waits_for_the_flood_to_end(num_slots: int) -> None:
    core = flooded(max_num_seqs=num_slots, requests=50, num_blocks=256)
    names = [f"tenant-{number}" for number in range(10)]
    for name in names:
        core.add(request_of(name, max_tokens=3, request_id=name))
    waiting, num_steps = set(names), 0
    while waiting:
        waiting -= {output.request_id for output in core.step().outputs if output.finish_reason}
        num_steps += 1
        # One generation of the flood can hold the only running slot until its end; after that it is everybody else's
        # turn.
        assert num_steps <= (100 if num_slots == 1 else 0) + 5 * len(names)
    assert core.scheduler.shares.num_living["flood"] > 10


def test_who_gives_up_a_seat_loses_no_token() -> None:
    core = make_core(max_num_seqs=4)
    flood = [request_of("flood", max_tokens=20) for _ in range(6)]
    for request in flood:
        core.add(request)
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in flood}
    for turn in range(400):
        if turn in (3, 6, 9, 12):
            core.add(request_of("small", max_tokens=4))
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    for request in flood:
        assert tokens_of(outputs[request.request_id]) == expected_tokens(core, request)
    assert_nothing_left(core)


def test_a_tenant_without_seats_takes_no_more_than_its_share_of_them() -> None:
    core = flooded(max_num_seqs=8, num_blocks=256)
    for _ in range(20):
        core.add(request_of("heavy", max_tokens=100, weight=3.0))
    for _ in range(5):
        core.step()
    assert seats_held(core) == {"flood": 2, "heavy": 6}
    plans = len(simulated(core).plans)
    for _ in range(10):
        assert core.step().stats.num_preemptions == 0  # and there it stays: nothing moves back and forth
    assert not any(plan.new_requests for plan in simulated(core).plans[plans:])


def test_a_lone_tenant_is_never_interrupted() -> None:
    core = flooded(max_num_seqs=4, requests=10, max_tokens=20)
    num_preemptions = 0
    while core.has_work:
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions == 0


def test_a_flood_that_never_ends_keeps_nobody_from_finishing() -> None:
    core = flooded(max_num_seqs=4, num_blocks=64)
    others = {f"other-{number}" for number in range(6)}
    for number, name in enumerate(sorted(others)):
        core.add(request_of(name, prompt=3 + 5 * number, max_tokens=20, request_id=name))
    for num_steps in count():
        if len(core.scheduler.waiting) < 10:
            core.add(request_of("flood", max_tokens=100))
        others -= {output.request_id for output in core.step().outputs if output.finish_reason}
        if not others:
            break
        assert num_steps < 400


# --- shares over time


@pytest.mark.slow
@pytest.mark.seconds
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.integers(1, 4),
    weights=st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=2, max_size=3),
)
def test_while_tenants_are_backlogged_they_are_served_by_their_weights(
    seed: int, num_slots: int, weights: list[float]
) -> None:
    """Between any two moments of a backlog, what two tenants were served by weight differs by a bounded amount.

    The bound does not grow with the backlog: it is what the running slots can hold, once for each of the two.
    """
    draw = random.Random(seed)
    max_prompt, max_output = 12, 12
    bound = 2 * num_slots * (max_prompt + OUTPUT_TOKEN_COST * max_output) / min(weights)
    core = make_core(max_num_seqs=num_slots, max_num_batched_tokens=draw.choice([8, 32]), num_blocks=128)
    tenants = {f"tenant-{number}": weight for number, weight in enumerate(weights)}
    owner: dict[str, str] = {}
    served: dict[str, float] = defaultdict(float)
    lead: dict[tuple[str, str], tuple[float, float]] = {}  # least and most by which the first was ahead
    most_served = 0.0
    for _ in range(500):
        for tenant, weight in tenants.items():
            if draw.random() < 0.4 and core.scheduler.shares.num_living[tenant] < 60:
                for _ in range(draw.choice([1, 1, 5])):
                    request = request_of(
                        tenant,
                        prompt=draw.randint(1, max_prompt),
                        max_tokens=draw.randint(1, max_output),
                        weight=weight,
                    )
                    owner[request.request_id] = tenant
                    core.add(request)
        for output in core.step().outputs:
            served[owner[output.request_id]] += OUTPUT_TOKEN_COST * len(output.new_token_ids)
        plan = simulated(core).plans.pop()
        for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            served[owner[request_id]] += num_tokens if num_tokens > 1 else 0
        waiting = {request.tenant for request in core.scheduler.waiting}
        for first, second in combinations(tenants, 2):
            if not {first, second} <= waiting:
                lead.pop((first, second), None)
                continue
            ahead = served[first] / tenants[first] - served[second] / tenants[second]
            least, most = lead.get((first, second), (ahead, ahead))
            least, most = lead[first, second] = min(least, ahead), max(most, ahead)
            assert most - least <= bound
        most_served = max(most_served, *(served[tenant] / weight for tenant, weight in tenants.items()))
    assert most_served > bound  # so that the bound could have been broken


# --- limits


def test_a_limit_on_seats_is_kept_and_blocks_nobody_behind_it() -> None:
    core = make_core(max_num_seqs=4)
    for _ in range(2):
        core.add(request_of("free", max_tokens=100))
    for _ in range(60):
        core.add(request_of("limited", max_tokens=5, max_running=1))
    for _ in range(80):
        core.step()
    # It has been served the least, so it stands first with all that it may not start.
    assert next(iter(core.scheduler.waiting)).tenant == "limited"
    late = request_of("free", max_tokens=5)
    core.add(late)
    assert steps_to_first_token(core, late.request_id) <= 2
    while core.has_work:
        core.step()
        assert seats_held(core)["limited"] <= 1


def test_nobody_gives_up_a_seat_for_a_tenant_at_its_limit() -> None:
    core = flooded(max_num_seqs=4)
    for _ in range(3):
        core.add(request_of("limited", max_tokens=30, max_running=1))
    core.step()
    core.step()
    assert seats_held(core) == {"flood": 3, "limited": 1}
    assert sum(core.step().stats.num_preemptions for _ in range(20)) == 0


def test_a_tenant_at_its_limit_leaves_seats_empty_rather_than_exceed_it() -> None:
    core = make_core(max_num_seqs=8)
    for _ in range(6):
        core.add(request_of("limited", max_tokens=4, max_running=2))
    while core.has_work:
        core.step()
        assert len(core.scheduler.running) <= 2
    assert max(len(batch) for batch in batches(core)) == 2


# --- credit and debt


def run_alone(core: EngineCore, tenant: str, *, requests: int = 10) -> None:
    for _ in range(requests):
        core.add(request_of(tenant, max_tokens=50))
    run_to_end(core)


def first_seats(core: EngineCore, number: int) -> list[str]:
    """The tenants of the next requests to get a running slot, in order."""
    tenants = {request.request_id: request.tenant for request in core.scheduler.requests.values()}
    simulated(core).plans.clear()
    while sum(len(plan.new_requests) for plan in simulated(core).plans) < number:
        core.step()
    return [tenants[new.request_id] for plan in simulated(core).plans for new in plan.new_requests][:number]


def test_a_tenant_back_from_idle_has_saved_no_credit() -> None:
    core = make_core(max_num_seqs=1)
    run_alone(core, "saver", requests=1)
    run_alone(core, "busy")
    for _ in range(6):
        core.add(request_of("busy", max_tokens=5))
        core.add(request_of("saver", max_tokens=5))
    assert Counter(first_seats(core, 6)) == {"busy": 3, "saver": 3}


def test_a_tenant_that_asks_for_little_saves_no_credit_meanwhile() -> None:
    core = make_core(max_num_seqs=3, num_blocks=128)
    core.add(request_of("saver", max_tokens=120))
    for _ in range(10):  # one after the other, so that nobody is ever waiting
        for _ in range(10):
            core.step()
        for _ in range(2):
            core.add(request_of("busy", max_tokens=10))
    for _ in range(12):
        core.add(request_of("saver", max_tokens=5))
        core.add(request_of("busy", max_tokens=5))
    assert 3 <= Counter(first_seats(core, 8))["busy"] <= 5


def test_a_tenant_at_its_limit_saves_no_credit_for_others() -> None:
    core = make_core(max_num_seqs=4, num_blocks=128)
    for _ in range(60):
        core.add(request_of("limited", max_tokens=10, max_running=1))
        core.add(request_of("busy", max_tokens=10))
    for _ in range(120):
        core.step()
    for _ in range(20):
        core.add(request_of("new", max_tokens=10))
    seated = Counter(first_seats(core, 16))
    assert seated["busy"] >= 4
    assert seated["new"] >= 4


def test_who_used_an_idle_engine_pays_nothing_for_it() -> None:
    core = make_core(max_num_seqs=1)
    run_alone(core, "busy")
    for _ in range(6):
        core.add(request_of("new", max_tokens=5))
        core.add(request_of("busy", max_tokens=5))
    assert Counter(first_seats(core, 6)) == {"busy": 3, "new": 3}


def test_what_is_remembered_of_idle_tenants_is_bounded_and_the_busy_are_never_forgotten() -> None:
    shares = TenantShares()
    shares.arrive("steady", 1.0, 0)
    for number in range(20_000):
        tenant = f"tenant-{number}"
        shares.arrive(tenant, 1.0, 0)
        shares.start(tenant)
        shares.charge(tenant, 5.0)
        shares.leave(tenant)
        shares.stop(tenant)
    assert len(shares._served) < 5000
    assert len(shares._weights) == len(shares._limits) == len(shares.num_living) == 1
    assert not shares.num_running
    assert shares.served("steady") == 0.0
    assert shares.served("tenant-19999") >= 5.0
