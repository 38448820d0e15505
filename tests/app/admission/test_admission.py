"""The queue's accounting, at moments that a real server does not reach on demand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from app.admission.admission import MAX_RETRY_AFTER, Admission, Limit
from app.admission.tenants import ANONYMOUS, Tenant
from app.config.settings import Settings
from engine.simulation.counting import VirtualClock
from protocol.errors import ApiError


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def refusals() -> list[Limit]:
    return []


@pytest.fixture
def admission(clock: VirtualClock, refusals: list[Limit]) -> Admission:
    return Admission(Settings(max_queued_requests=100, max_queued_tokens=1000), on_refused=refusals.append, clock=clock)


def refused(
    admission: Admission, tenant: Tenant = ANONYMOUS, choices: int = 1, timeout: float | None = None
) -> ApiError:
    with pytest.raises(ApiError) as refusal, admission.queue(tenant, choices, 1, timeout):
        pass
    return refusal.value


def taken(admission: Admission) -> tuple[int, int]:
    return admission.places.total, admission.tokens.total


def serve(admission: Admission, clock: VirtualClock, per_second: int, seconds: int) -> None:
    """Let requests come and start for a while at an even rate."""
    for _ in range(per_second * seconds):
        with admission.queue(ANONYMOUS, 1, 1, None) as ticket:
            clock.now += 1 / per_second
            ticket.begin()


def test_retry_after_grows_with_the_queue_and_shrinks_with_its_pace(admission: Admission, clock: VirtualClock) -> None:
    assert admission.retry_after() >= 1, "before anything is known"
    serve(admission, clock, per_second=4, seconds=60)
    with ExitStack() as stack:
        told = []
        for _ in range(5):
            for _ in range(20):
                stack.enter_context(admission.queue(ANONYMOUS, 1, 1, None))
            told.append(admission.retry_after())
        assert told == sorted(told)
        assert told[-1] > 2 * told[0]
        assert int(refused(admission).headers["retry-after"]) >= told[-1]
    assert admission.retry_after() < told[-1]
    serve(admission, clock, per_second=40, seconds=60)
    assert admission.retry_after() == 1


def test_those_who_were_refused_are_not_all_asked_back_at_the_same_moment(
    admission: Admission, clock: VirtualClock
) -> None:
    serve(admission, clock, per_second=4, seconds=60)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(admission.queue(ANONYMOUS, 1, 1, None))
        told = [int(refused(admission).headers["retry-after"]) for _ in range(400)]
    assert told == sorted(told)
    assert told[0] < told[-1] <= MAX_RETRY_AFTER


def test_a_first_token_that_cannot_come_in_time_is_not_waited_for(
    admission: Admission, clock: VirtualClock, refusals: list[Limit]
) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(admission.queue(ANONYMOUS, 1, 1, 0.001))  # nothing is known of the pace yet
    serve(admission, clock, per_second=10, seconds=60)
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(admission.queue(ANONYMOUS, 1, 1, None))  # about five seconds of work
        assert "first token within 2 s" in refused(admission, timeout=2.0).message
        assert refusals == [Limit.DEADLINE]
        stack.enter_context(admission.queue(ANONYMOUS, 1, 1, 20.0))
        stack.enter_context(admission.queue(ANONYMOUS, 1, 1, None))


def test_a_quiet_server_is_not_taken_for_a_slow_one(
    admission: Admission, clock: VirtualClock, refusals: list[Limit]
) -> None:
    """One request in ten seconds starts in a tenth of one: a second that comes beside it may hope for the same."""
    for _ in range(10):
        clock.now += 9.9
        with admission.queue(ANONYMOUS, 1, 1, None) as ticket:
            clock.now += 0.1
            ticket.begin()
    with admission.queue(ANONYMOUS, 1, 1, None), admission.queue(ANONYMOUS, 1, 1, 0.5):
        assert admission.retry_after() == 1
    assert refusals == []
    with admission.queue(ANONYMOUS, 1, 1, -1.0):
        pass  # out of time already: its deadline answers, not a full queue


def test_a_tenants_own_limit_binds_that_tenant_only(admission: Admission, refusals: list[Limit]) -> None:
    small, other = Tenant(name="small", max_queued_requests=2), Tenant(name="other")
    with admission.queue(small, 2, 1, None):
        assert refused(admission, small).status == 429
        assert refusals == [Limit.TENANT]
        with admission.queue(other, 50, 1, None):
            assert admission.places.total == 52
    with admission.queue(small, 2, 1, None):
        pass
    assert refused(admission, small, choices=3).status == 400, "it would never fit"
    assert refused(admission, other, choices=101).status == 400
    assert refusals == [Limit.TENANT], "an impossible request is no refusal for want of room"


def test_an_estimate_becomes_a_count_and_everything_comes_back(admission: Admission) -> None:
    with admission.queue(ANONYMOUS, 1, 900, None) as first:
        first.count_tokens(200)
        assert admission.tokens.total == 200
        with admission.queue(ANONYMOUS, 3, 800, None) as second:
            assert admission.is_full
            second.begin()
            assert taken(admission) == (3, 734)
            second.begin()
            second.begin()
            second.begin()
            second.leave()
            second.count_tokens(5000)
            assert taken(admission) == (1, 200), "once, and for all"
    assert taken(admission) == (0, 0)
    assert not admission.is_full
    with pytest.raises(RuntimeError), admission.queue(ANONYMOUS, 1, 900, None):
        raise RuntimeError
    assert taken(admission) == (0, 0)
