"""Limits of requests and of tokens per minute, by tenant. Used on the event loop only.

1. Each limit is a token bucket that holds one minute's worth. What a tenant has used comes back evenly over a minute.
2. Prompt tokens count when their request is admitted, generated tokens when they are there. So answers in progress may
   use more than is left; then the tenant's next request waits until that has come back, too.
3. A refused request uses nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

from app.admission.tenants import Tenant
from engine.config import Clock
from protocol.errors import ApiError

KINDS = ("requests", "tokens")
MINUTE = 60.0

CountTokens = Callable[[], int]
"""Returns the number of tokens that an answer has by now."""

OnRefused = Callable[[str], None]
"""Is called with the kind of limit."""


class RateLimits:
    """The use of all limits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By tenant and kind: the time at which nothing will count as used any more.
        self._free_at: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._answers: defaultdict[str, dict[CountTokens, int]] = defaultdict(dict)  # in progress: tokens counted

    def take(self, tenant: Tenant, tokens: int, on_refused: OnRefused) -> None:
        """Count a request with so many prompt tokens. Raises what `check` raises."""
        self.check(tenant, on_refused, tokens)
        self._add(tenant, "requests", 1)
        self._add(tenant, "tokens", tokens)

    def give_back(self, tenant: Tenant, tokens: int) -> None:
        """Undo `take` of a request that was refused afterwards, for example because its prompt is too long."""
        self._add(tenant, "requests", -1)
        self._add(tenant, "tokens", -tokens)

    def check(self, tenant: Tenant, on_refused: OnRefused, tokens: int = 1) -> None:
        """Raise ApiError 429 if a request with so many prompt tokens would exceed a limit of its tenant, after calling
        `on_refused`. A prompt that alone exceeds the limit is admitted when nothing counts as used."""
        for kind, limit, used in self._limits(tenant):
            asked = tokens if kind == "tokens" else 1
            if (excess := used + min(asked, limit) - limit) > 0:
                seconds = math.ceil(excess * MINUTE / limit)
                on_refused(kind)
                raise ApiError(
                    429,
                    f"Rate limit of tenant {tenant.name!r} on {kind} per minute: limit {limit}, used "
                    f"{math.ceil(used)}, requested {asked}. Please try again in {seconds} s.",
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(seconds)},
                )

    def headers(self, tenant: Tenant) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's headers of the tenant's limits. A reset is the time until nothing counts as used any more."""
        for kind, limit, used in self._limits(tenant):
            minutes, seconds = divmod(math.ceil(used * MINUTE / limit * 1000) / 1000, 60)
            reset = f"{minutes:.0f}m{seconds:g}s" if minutes else f"{seconds:g}s"
            for name, value in ("limit", limit), ("remaining", max(0, math.floor(limit - used))), ("reset", reset):
                yield f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()

    def attend(self, tenant: Tenant, count: CountTokens) -> None:
        """Count the tokens of an answer until `leave`."""
        if tenant.tokens_per_minute is not None:
            self._answers[tenant.name][count] = 0

    def leave(self, tenant: Tenant, count: CountTokens) -> None:
        """Count the last tokens of an answer."""
        self._count_answers(tenant)
        self._answers[tenant.name].pop(count, None)

    def _limits(self, tenant: Tenant) -> Iterator[tuple[str, int, float]]:
        """Yield the tenant's limits: kind, limit, and how much of it counts as used now."""
        self._count_answers(tenant)
        for kind in KINDS:
            if (limit := getattr(tenant, f"{kind}_per_minute")) is not None:
                yield kind, limit, max(0.0, self._free_at[tenant.name, kind] - self._clock()) * limit / MINUTE

    def _count_answers(self, tenant: Tenant) -> None:
        answers = self._answers[tenant.name]
        for count, counted in answers.items():
            answers[count] = count()
            self._add(tenant, "tokens", answers[count] - counted)

    def _add(self, tenant: Tenant, kind: str, amount: int) -> None:
        if (limit := getattr(tenant, f"{kind}_per_minute")) is not None:
            key = tenant.name, kind
            self._free_at[key] = max(self._free_at[key], self._clock()) + amount * MINUTE / limit
