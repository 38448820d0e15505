"""Whatever one tenant queues, every other finds its part of the queue free."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.admission import Admission, QueueTicket
from app.admission.tenants import ANONYMOUS, Tenant, place_reserves, token_reserves
from app.config.settings import Settings
from protocol.errors import ApiError


def tenants_of(*weights: float, **fields: Any) -> list[Tenant]:
    return [Tenant(name=f"tenant-{number}", weight=weight, **fields) for number, weight in enumerate(weights)]


def admission_of(places: int, tenants: list[Tenant], tokens: int = 10**6) -> Admission:
    return Admission(Settings(max_queued_requests=places, max_queued_tokens=tokens), tenants=tenants)


def fill(admission: Admission, tenant: Tenant, stack: ExitStack, tokens: int = 1) -> tuple[int, ApiError]:
    """Queue as many choices as there is room for. Returns how many, and the refusal."""
    count = 0
    while True:
        try:
            stack.enter_context(admission.queue(tenant, 1, tokens, None))
        except ApiError as refusal:
            return count, refusal
        count += 1
        assert count <= admission.places.limit


def test_a_lone_tenant_has_the_whole_queue() -> None:
    for tenant in (ANONYMOUS, *tenants_of(0.5)):
        admission = admission_of(10, [tenant])
        with ExitStack() as stack:
            assert fill(admission, tenant, stack)[0] == 10
            assert admission.is_full


def test_a_flood_leaves_every_other_tenant_its_reserve() -> None:
    tenants = tenants_of(1, 1, 2)
    admission = admission_of(20, tenants)
    assert place_reserves(20, tenants) == {"tenant-0": 2, "tenant-1": 2, "tenant-2": 4}
    flood, *others = tenants
    with ExitStack() as stack:
        count, refusal = fill(admission, flood, stack)
        assert count == 14
        assert "14 of 20 places are taken, 14 of them yours, and 6 are kept for other tenants" in refusal.message
        assert not admission.is_full
        assert [fill(admission, other, stack)[0] for other in others] == [2, 4]
        assert admission.is_full


@pytest.mark.parametrize("num_tenants", [2, 3, 6])
def test_where_there_is_a_place_for_each_tenant_each_finds_one(num_tenants: int) -> None:
    tenants = tenants_of(1000, *[0.001] * (num_tenants - 1))
    admission = admission_of(6, tenants)
    with ExitStack() as stack:
        assert fill(admission, tenants[0], stack)[0] == 6 - (num_tenants - 1)
        for other in tenants[1:]:
            assert fill(admission, other, stack)[0] == 1
        assert admission.places.total == 6


def test_of_more_tenants_than_places_half_of_the_places_are_for_those_who_have_none() -> None:
    tenants = tenants_of(*[1] * 20)
    admission = admission_of(8, tenants)
    with ExitStack() as stack:
        assert fill(admission, tenants[0], stack)[0] == 5
        assert [fill(admission, other, stack)[0] for other in tenants[1:5]] == [1, 1, 1, 0]
        assert admission.is_full


def test_a_limit_of_its_own_cuts_a_tenants_reserve_and_gives_it_to_all() -> None:
    small, *others = tenants_of(1, max_queued_requests=1) + tenants_of(1, 1)[1:]
    admission = admission_of(20, [small, *others])
    with ExitStack() as stack:
        assert fill(admission, others[0], stack)[0] == 19


def test_more_choices_than_are_left_by_the_reserves_could_never_wait() -> None:
    first, second = tenants_of(1, 1)
    admission = admission_of(8, [first, second])
    with admission.queue(first, 6, 1, None), admission.queue(second, 2, 1, None):
        assert admission.is_full
    with pytest.raises(ApiError) as refusal, admission.queue(first, 7, 1, None):
        pass
    assert (refusal.value.status, refusal.value.param) == (400, "n")
    assert "at most 6" in refusal.value.message


def test_a_newcomer_is_let_in_with_any_prompt_beside_a_flood_of_tokens() -> None:
    flood, other = tenants_of(1, 1)
    admission = admission_of(1000, [flood, other], tokens=1000)
    with ExitStack() as stack:
        count, refusal = fill(admission, flood, stack, tokens=100)
        assert count == 7
        assert "700 of 1000 prompt tokens wait, 700 of them yours, and 250 are kept" in refusal.message
        stack.enter_context(admission.queue(other, 1, 100, None))
        stack.enter_context(admission.queue(other, 1, 100, None))
        assert fill(admission, other, stack, tokens=100)[0] == 1
    with ExitStack() as stack:
        fill(admission, flood, stack, tokens=100)
        assert not admission.is_full
        stack.enter_context(admission.queue(other, 1, 400, None))
        assert admission.is_full
        assert fill(admission, other, stack, tokens=1)[0] == 0


def test_an_estimate_that_was_too_low_takes_nothing_of_what_is_kept_for_others() -> None:
    flood, other = tenants_of(1, 1)
    admission = admission_of(1000, [flood, other], tokens=1000)
    with ExitStack() as stack:
        stack.enter_context(admission.queue(flood, 1, 10, None)).count_tokens(50_000)
        assert fill(admission, other, stack, tokens=50)[0] == 5


@pytest.mark.slow
@pytest.mark.seconds
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    limit=st.integers(1, 60),
    token_limit=st.integers(1, 500),
    weights=st.lists(st.sampled_from([0.001, 0.3, 1.0, 1.0, 7.0, 1000.0]), min_size=1, max_size=12),
)
def test_whatever_is_queued_reserves_hold_limits_hold_and_the_books_balance(
    seed: int, limit: int, token_limit: int, weights: list[float]
) -> None:
    draw = random.Random(seed)
    tenants = [
        tenant.model_copy(update={"max_queued_requests": draw.choice([None, None, 1, 5, 100])})
        for tenant in tenants_of(*weights)
    ]
    admission = admission_of(limit, tenants, token_limit)
    reserves, token_part = place_reserves(limit, tenants), token_reserves(token_limit, tenants)
    assert sum(token_part.values()) <= token_limit
    waiting: list[tuple[QueueTicket, ExitStack]] = []
    for _ in range(120):
        tenant = draw.choice(tenants)
        name = tenant.name
        own = admission.places.taken_by(name)
        choices = draw.choice([1, 1, 1, 2, draw.randint(1, 10)])
        tokens = draw.choice([0, 1, draw.randint(1, 50), draw.randint(1, 600)])
        own_limit = tenant.max_queued_requests or limit
        due = own + choices <= min(reserves.get(name, 0), own_limit) and len(tenants) <= limit
        due = due and (not own or admission.tokens.taken_by(name) + tokens <= token_part.get(name, 0))
        was_full = admission.is_full
        with ExitStack() as scope:
            try:
                place = scope.enter_context(admission.queue(tenant, choices, tokens, None))
            except ApiError:
                assert not due
            else:
                assert not was_full or tokens == 0
                waiting.append((place, scope.pop_all()))
                if own and admission.tokens.taken_by(name) > token_part.get(name, 0):
                    assert admission.tokens.total <= token_limit
        assert admission.places.total <= limit
        if admission.is_full:  # then it is so for everybody
            for each in tenants:
                with pytest.raises(ApiError), admission.queue(each, 1, 1, None):
                    pass
        elif len(tenants) == 1 and not own_limit < limit:
            with admission.queue(tenants[0], 1, 0, None):
                pass
        while waiting and draw.random() < 0.4:
            place, held = waiting.pop(draw.randrange(len(waiting)))
            if draw.random() < 0.5:
                place.count_tokens(draw.randint(0, 100))
            for _ in range(draw.randint(0, place.choices)):
                place.begin()
            if draw.random() < 0.7:
                held.close()
            else:
                waiting.append((place, held))
        for name in (tenant.name for tenant in tenants):
            held_by = [place for place, _ in waiting if place.tenant.name == name]
            assert admission.places.taken_by(name) == sum(place.choices for place in held_by)
            assert admission.tokens.taken_by(name) == sum(place.tokens for place in held_by)
    for _, held in waiting:
        held.close()
    for room in (admission.places, admission.tokens):
        assert room.total == room._inside == 0
        assert not room._taken
    assert admission._num_waiting_tenants == 0


def test_tenants_that_come_and_go_while_others_wait_leave_the_accounts_right() -> None:
    """Whoever is told of later has the same part as if it had been there from the start."""
    first, heavy, newcomer = tenants_of(1, 3, 1)
    admission = admission_of(20, [first, heavy])
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.queue(first, 1, 1, None))
        admission.set_tenants([first, newcomer])
        with ExitStack() as others:
            expected = admission_of(20, [first, newcomer])
            for _ in range(3):
                others.enter_context(expected.queue(first, 1, 1, None))
            assert fill(admission, newcomer, stack)[0] == fill(expected, newcomer, others)[0]
            assert fill(admission, first, stack)[0] == fill(expected, first, others)[0]
    assert admission.places.total == admission.tokens.total == 0
    now_heavier = newcomer.model_copy(update={"weight": 9.0})
    with ExitStack() as stack:
        stack.enter_context(admission.queue(newcomer, 1, 1, None))
        admission.set_tenants([now_heavier, heavy])
        stack.enter_context(admission.queue(now_heavier, 1, 1, None))
    with ExitStack() as stack:
        assert fill(admission, heavy, stack)[0] == 20 - place_reserves(20, [now_heavier, heavy])[newcomer.name]
