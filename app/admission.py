"""Who may queue: the server says no early, cheaply and with a time to come back, instead of late.

A request takes places in the queue (one per choice) and tokens (its prompt, once per prompt) from its arrival, before
anything is tokenized, until its first output. What does not fit is refused with 429 and a Retry-After from the rate at
which the queue has been draining. Belongs to the event loop.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.settings import Settings
from app.tenants import Tenant
from protocol.errors import ApiError

MAX_RETRY_AFTER = 60  # seconds
_MEMORY = 10.0  # seconds over which rates are averaged


class Limit(enum.StrEnum):
    """What a request was refused for, in the words of the metrics."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    TENANT = "tenant_max_queued_requests"
    DEADLINE = "first_token_deadline"


class Pace:
    """How fast the queue drains, recent times counting most, and how many were refused of late.

    Starts are divided by the seconds in which somebody waited, not by all seconds: on a quiet server few requests
    start because few arrive, and that says nothing about how long the next one would wait.
    """

    def __init__(self) -> None:
        self._starts = 0.0
        self._seconds = 0.0  # with somebody in the queue
        self.refusals = 0.0
        self._updated = time.monotonic()

    def advance(self, *, waiting: bool) -> None:
        """The time until now has passed, with somebody in the queue or nobody. Called before either changes."""
        now = time.monotonic()
        kept = math.exp((self._updated - now) / _MEMORY)
        self._starts *= kept
        self._seconds = self._seconds * kept + (_MEMORY * (1.0 - kept) if waiting else 0.0)
        self.refusals *= kept
        self._updated = now

    def start(self, count: int) -> None:
        self._starts += count

    def refuse(self) -> None:
        self.refusals += 1

    @property
    def per_second(self) -> float:
        """Choices that start per second; 0 while nothing is known."""
        return self._starts / self._seconds if self._seconds > 0.0 else 0.0


class Place:
    """A request's place in the queue. `leave` is called with its first output, or when its scope is left."""

    def __init__(self, admission: Admission, tenant: Tenant, choices: int, tokens: int) -> None:
        self.tenant = tenant
        self.choices = choices
        self.tokens = tokens
        self._admission = admission
        self._waiting = True

    def count_tokens(self, tokens: int) -> None:
        """The prompt has been tokenized: the estimate becomes a count."""
        if self._waiting:
            self._admission.queued_tokens += tokens - self.tokens
            self.tokens = tokens

    def leave(self, *, started: bool) -> None:
        """Give the place back; `started` if the request got its first output. Idempotent."""
        if self._waiting:
            self._waiting = False
            self._admission.release(self, started)


class Admission:
    """The queue's books. Limits count choices and prompt tokens that wait for their first output.

    `on_refused` is told of every refusal that is answered with 429.
    """

    def __init__(self, settings: Settings, on_refused: Callable[[Limit], None] = lambda limit: None) -> None:
        self._max_requests = settings.max_queued_requests
        self._max_tokens = settings.max_queued_tokens
        self.queued_requests = 0
        self.queued_tokens = 0
        self._by_tenant: Counter[str] = Counter()
        self._on_refused = on_refused
        self._pace = Pace()

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return self.queued_requests >= self._max_requests or self.queued_tokens >= self._max_tokens

    @contextmanager
    def queue(self, tenant: Tenant, choices: int, tokens: int, patience: float | None) -> Iterator[Place]:
        """Hold a place in the queue. `patience` is how many seconds the request has to its first token.

        Raises ApiError 429 when there is no place, or none from which it could start in time, and 400 when there
        could never be one.
        """
        self._pace.advance(waiting=self.queued_requests > 0)
        self._check(tenant, choices, tokens, patience)
        place = Place(self, tenant, choices, tokens)
        self.queued_requests += choices
        self.queued_tokens += tokens
        self._by_tenant[tenant.name] += choices
        try:
            yield place
        finally:
            place.leave(started=False)

    def release(self, place: Place, started: bool) -> None:
        """Called by a Place, once."""
        self._pace.advance(waiting=True)
        self.queued_requests -= place.choices
        self.queued_tokens -= place.tokens
        self._by_tenant[place.tenant.name] -= place.choices
        if not self._by_tenant[place.tenant.name]:
            del self._by_tenant[place.tenant.name]
        if started:
            self._pace.start(place.choices)

    def _check(self, tenant: Tenant, choices: int, tokens: int, patience: float | None) -> None:
        own_limit = math.inf if tenant.max_queued_requests is None else tenant.max_queued_requests
        possible = min(own_limit, self._max_requests)
        if choices > possible:  # it would be refused for ever
            raise ApiError(400, f"The request asks for {choices} choices; at most {possible} can wait.", param="n")
        own = self._by_tenant[tenant.name]
        if own + choices > own_limit:
            raise self._refusal(Limit.TENANT, f"Your queue is full: {own} of {own_limit} places are taken.")
        if self.queued_requests + choices > self._max_requests:
            raise self._refusal(
                Limit.REQUESTS, f"The queue is full: {self.queued_requests} of {self._max_requests} places are taken."
            )
        if self.queued_requests and self.queued_tokens + tokens > self._max_tokens:
            raise self._refusal(
                Limit.TOKENS, f"The queue is full: {self.queued_tokens} of {self._max_tokens} prompt tokens wait."
            )
        rate = self._pace.per_second
        if patience is not None and rate > 0 and self.queued_requests / rate > max(patience, 0.0):
            raise self._refusal(
                Limit.DEADLINE,
                f"The queue is too long for a first token within {patience:g} s: "
                f"{self.queued_requests} wait and {rate:.2g} start per second.",
            )

    def _refusal(self, limit: Limit, message: str) -> ApiError:
        self._pace.refuse()
        self._on_refused(limit)
        return ApiError(
            429,
            f"{message} Please try again later.",
            code="queue_full",
            headers={"retry-after": str(self.retry_after())},
        )

    def retry_after(self) -> int:
        """Seconds until half of the queue, and all who were refused lately, can be expected to have had their turn."""
        rate = self._pace.per_second
        if rate == 0.0:
            return 1
        ahead = self.queued_requests / 2 + self._pace.refusals
        return max(1, min(math.ceil(ahead / rate), MAX_RETRY_AFTER))
