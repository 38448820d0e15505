"""Requests and tokens per minute: what counts, what is left, and when a refused request may come again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies

from app.admission.admission import Admission, Limit
from app.admission.rates import RateLimits
from app.admission.tenants import ANONYMOUS, Tenant
from app.config.settings import Settings
from protocol.errors import ApiError


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Limited:
    requests: int | None = None
    tokens: int | None = None
    clock: Clock = field(default_factory=Clock)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = RateLimits(self.clock)
        self.tenant = Tenant(name="acme", requests_per_minute=self.requests, tokens_per_minute=self.tokens)

    def take(self, tokens: int = 1) -> int | None:
        """None, or the seconds to wait."""
        try:
            self.rates.take(self.tenant, tokens, self.refused.append)
        except ApiError as error:
            return int(error.headers["retry-after"])
        return None

    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.rates.headers(self.tenant)}

    def left(self, kind: str) -> tuple[str, str]:
        headers = self.headers()
        return headers[f"x-ratelimit-remaining-{kind}"], headers[f"x-ratelimit-reset-{kind}"]


def test_a_minutes_worth_at_once_and_then_evenly() -> None:
    limited = Limited(requests=60)
    assert [limited.take() for _ in range(61)] == [None] * 60 + [1]
    limited.clock.now += 1.0
    assert (limited.take(), limited.take()) == (None, 1)
    limited.clock.now += 3600.0
    assert [limited.take() for _ in range(61)] == [None] * 60 + [1], "what was not used is not saved up"


def test_headers_have_openais_names_and_forms() -> None:
    limited = Limited(requests=60, tokens=1000)
    assert limited.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "1000",
        "x-ratelimit-reset-tokens": "0s",
    }
    assert limited.take(100) is None
    assert limited.left("requests") == ("59", "1s")
    assert limited.left("tokens") == ("900", "6s")
    limited.clock.now += 0.5
    assert limited.left("requests") == ("59", "0.5s")
    assert Limited(requests=1).headers().keys() == {
        f"x-ratelimit-{of}-requests" for of in ("limit", "remaining", "reset")
    }
    assert Limited().headers() == {}


def test_the_refusal_names_the_limit_and_the_use_and_when_to_come_again() -> None:
    limited = Limited(tokens=1000)
    assert limited.take(900) is None
    with pytest.raises(ApiError) as refused:
        limited.rates.take(limited.tenant, 200, limited.refused.append)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.type == "rate_limit_error"
    assert refused.value.message == (
        "Rate limit of tenant 'acme' on tokens per minute: limit 1000, used 900, requested 200. "
        "Please try again in 6 s."
    )
    assert limited.refused == ["tokens"]
    limited.clock.now += 6.0
    assert limited.take(200) is None


def test_a_refused_request_uses_nothing() -> None:
    limited = Limited(requests=10, tokens=100)
    assert limited.take(90) is None
    assert [limited.take(20) for _ in range(50)] == [6] * 50
    assert limited.left("requests")[0] == "9"
    assert limited.take(10) is None


def test_tokens_of_answers_count_while_they_come_and_once() -> None:
    limited = Limited(tokens=1000)
    num_tokens = 0

    def count() -> int:
        return num_tokens

    assert limited.take(100) is None
    limited.rates.attend(limited.tenant, count)
    num_tokens = 300
    assert limited.left("tokens") == ("600", "24s")
    assert limited.left("tokens") == ("600", "24s")
    num_tokens = 1400
    assert limited.left("tokens") == ("0", "1m30s"), "it goes on, and is owed"
    assert limited.take(1) == 31
    num_tokens = 1500
    limited.rates.leave(limited.tenant, count)
    limited.rates.leave(limited.tenant, count)
    assert limited.left("tokens") == ("0", "1m36s")


def test_a_prompt_beyond_the_limit_is_admitted_when_nothing_is_used_and_is_owed() -> None:
    limited = Limited(tokens=100)
    assert limited.take(1) is None
    assert limited.take(1000) == 1
    limited.clock.now += 1.0
    assert limited.take(1000) is None
    assert limited.take(1) == 541


def test_tenants_do_not_share_and_a_reload_changes_the_limit_at_once() -> None:
    limited = Limited(requests=2)
    assert [limited.take() for _ in range(3)] == [None, None, 30]
    other = Tenant(name="other", requests_per_minute=1)
    limited.rates.take(other, 5, limited.refused.append)
    with pytest.raises(ApiError):
        limited.rates.take(other, 5, limited.refused.append)
    limited.tenant = Tenant(name="acme")
    assert [limited.take() for _ in range(100)] == [None] * 100


@given(strategies.integers(0, 2**32), strategies.integers(1, 500))
def test_no_minute_admits_more_than_two_limits_and_long_runs_keep_the_rate(seed: int, limit: int) -> None:
    """At most a full bucket and its refill are admitted in a minute; a retry after `Retry-After` always is."""
    limited, draw = Limited(tokens=limit), random.Random(seed)
    taken: list[tuple[float, int]] = []
    begin = limited.clock.now
    for _ in range(300):
        limited.clock.now += draw.choice([0.0, 0.1, 1.0, 5.0])
        tokens = draw.randint(1, limit)
        if (seconds := limited.take(tokens)) is not None:
            if draw.random() < 0.5:
                continue
            limited.clock.now += seconds
            assert limited.take(tokens) is None
        taken.append((limited.clock.now, tokens))
    for start, _ in taken:
        assert sum(tokens for at, tokens in taken if start <= at <= start + 60) <= 2 * limit + 1e-6
    assert sum(tokens for _, tokens in taken) <= limit * (1 + (limited.clock.now - begin) / 60) + 1e-6


def test_in_the_queue_the_limit_comes_first_and_is_counted_when_the_prompt_is_known() -> None:
    refused: list[Limit] = []
    clock = Clock()
    tenant = Tenant(name="acme", requests_per_minute=2, tokens_per_minute=50)
    admission = Admission(Settings(), refused.append, [tenant], clock=clock)
    with admission.queue(tenant, 1, 10, None) as ticket:
        ticket.count_tokens(30)
        with admission.queue(tenant, 1, 10, None) as second, pytest.raises(ApiError, match="requested 30"):
            second.count_tokens(30)
        for _ in range(5):  # refused afterwards: the engine does not get them
            with admission.queue(tenant, 1, 10, None) as second:
                second.count_tokens(20)
        with admission.queue(tenant, 1, 10, None) as second:
            second.count_tokens(20)
            second.attend(lambda: 0)
        with (
            pytest.raises(ApiError, match="on requests per minute: limit 2, used 2"),
            admission.queue(tenant, 1, 10, None),
        ):
            pass
    with admission.queue(ANONYMOUS, 1, 10, None) as free:
        free.count_tokens(10**6)
    assert refused == [Limit.TOKEN_RATE, Limit.REQUEST_RATE]
