"""Who may queue: the server says no early, cheaply and with a time to come back, instead of late.

A request takes places in the queue (one per choice) and tokens (its prompt, once per prompt) from its arrival, before
anything is tokenized; each choice gives its part back with its first output. Tenants share both by `app.queue_shares`.
What does not fit is refused with 429 and a Retry-After from the rate at which its tenant's requests have been starting.
Belongs to the event loop.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from app.queue_shares import SharedRoom, place_reserves, token_reserves
from app.settings import Settings
from app.tenants import ANONYMOUS, Tenant
from engine.clock import Clock
from protocol.errors import ApiError

MAX_RETRY_AFTER = 60  # seconds
_MEMORY = 10.0  # seconds over which rates are averaged


class Limit(enum.StrEnum):
    """What a request was refused for, in the words of the metrics."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    TENANT = "tenant_max_queued_requests"
    DEADLINE = "first_token_deadline"
    BACKGROUND = "max_background_responses"


class Pace:
    """How fast the queue drains, recent times counting most, and how many were refused of late.

    Starts are divided by the seconds in which somebody waited, not by all seconds: on a quiet server few requests
    start because few arrive, and that says nothing about how long the next one would wait.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._starts = 0.0
        self._seconds = 0.0  # with somebody in the queue
        self.refusals = 0.0
        self._updated = self._clock()

    def advance(self, *, waiting: bool) -> None:
        """The time until now has passed, with somebody in the queue or nobody. Called before either changes."""
        now = self._clock()
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


class QueueTicket:
    """A request's place in the queue. `begin` is called with the first output of each choice, `leave` when its scope is
    left."""

    def __init__(self, admission: Admission, tenant: Tenant, choices: int, tokens: int) -> None:
        self.tenant = tenant
        self.choices = choices  # that wait
        self.tokens = tokens
        self._admission = admission

    def count_tokens(self, tokens: int) -> None:
        """The prompt has been tokenized: the estimate becomes a count. Nothing has begun yet."""
        if self.choices:
            self._admission.tokens.take(self.tenant.name, tokens - self.tokens)
            self.tokens = tokens

    def begin(self) -> None:
        """A choice got its first output, and leaves the queue with its part of the tokens."""
        if self.choices:
            self._admission.release(self, 1, self.tokens // self.choices, started=True)

    def leave(self) -> None:
        """Give back what is left. Idempotent."""
        if self.choices:
            self._admission.release(self, self.choices, self.tokens, started=False)


class Admission:
    """The queue's accounting. Limits count choices and prompt tokens that wait for their first output.

    `tenants` are all there are. `on_refused` is told of every refusal that is answered with 429.
    """

    def __init__(
        self,
        settings: Settings,
        on_refused: Callable[[Limit], None] = lambda limit: None,
        tenants: Collection[Tenant] = (ANONYMOUS,),
        clock: Clock = time.monotonic,
    ) -> None:
        self.places = SharedRoom(settings.max_queued_requests, place_reserves(settings.max_queued_requests, tenants))
        self.tokens = SharedRoom(settings.max_queued_tokens, token_reserves(settings.max_queued_tokens, tenants))
        self._num_tenants = len(tenants)
        self._num_waiting_tenants = 0
        self._on_refused = on_refused
        self._clock = clock
        self._pace = Pace(clock)  # of all together
        self._paces: dict[str, Pace] = {}

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused, whose ever it is."""
        everybody_waits = self._num_waiting_tenants >= self._num_tenants
        return self.places.is_full or (everybody_waits and self.tokens.is_full)

    @contextmanager
    def queue(self, tenant: Tenant, choices: int, tokens: int, timeout: float | None) -> Iterator[QueueTicket]:
        """Hold a place in the queue. `timeout` is how many seconds the request has to its first token.

        Raises ApiError 429 when there is no place, or none from which it could start in time, and 400 when there
        could never be one.
        """
        self._advance(tenant)
        self._check(tenant, choices, tokens, timeout)
        ticket = QueueTicket(self, tenant, choices, tokens)
        self._num_waiting_tenants += not self.places.taken_by(tenant.name)
        self.places.take(tenant.name, choices)
        self.tokens.take(tenant.name, tokens)
        try:
            yield ticket
        finally:
            ticket.leave()

    def release(self, ticket: QueueTicket, choices: int, tokens: int, *, started: bool) -> None:
        """Called by a QueueTicket, for a part of it."""
        name = ticket.tenant.name
        self._advance(ticket.tenant)
        ticket.choices -= choices
        ticket.tokens -= tokens
        self.places.take(name, -choices)
        self.tokens.take(name, -tokens)
        self._num_waiting_tenants -= not self.places.taken_by(name)
        if started:
            self._pace.start(choices)
            self._paces[name].start(choices)

    def _advance(self, tenant: Tenant) -> None:
        self._pace.advance(waiting=self.places.total > 0)
        pace = self._paces.setdefault(tenant.name, Pace(self._clock))
        pace.advance(waiting=self.places.taken_by(tenant.name) > 0)

    def _check(self, tenant: Tenant, choices: int, tokens: int, timeout: float | None) -> None:
        name = tenant.name
        own_limit = math.inf if tenant.max_queued_requests is None else tenant.max_queued_requests
        possible = min(own_limit, self.places.most_for(name))
        if choices > possible:  # it would be refused for ever
            raise ApiError(400, f"The request asks for {choices} choices; at most {possible} can wait.", param="n")
        own = self.places.taken_by(name)
        if own + choices > own_limit:
            raise self._refusal(tenant, Limit.TENANT, f"Your queue is full: {own} of {own_limit} places are taken.")
        if not self.places.fits(name, choices):
            raise self._refusal(tenant, Limit.REQUESTS, self._full(self.places, name, "places are taken"))
        # Who has nobody waiting is let in with any prompt: it may be longer than the tenant's reserve, and even than
        # the limit, so there might never be room for it beside others who keep the queue full.
        if own and not self.tokens.fits(name, tokens):
            raise self._refusal(tenant, Limit.TOKENS, self._full(self.tokens, name, "prompt tokens wait"))
        rate = self._paces[name].per_second  # its own: by their shares, nobody waits for the queue of another
        if timeout is not None and rate > 0 and own / rate > max(timeout, 0.0):
            raise self._refusal(
                tenant,
                Limit.DEADLINE,
                f"The queue is too long for a first token within {timeout:g} s: "
                f"{own} wait and {rate:.2g} start per second.",
            )

    @staticmethod
    def _full(room: SharedRoom, tenant: str, what: str) -> str:
        kept = room.kept_from(tenant)
        others = f", {room.taken_by(tenant)} of them yours, and {kept} are kept for other tenants" if kept else ""
        return f"The queue is full: {room.total} of {room.limit} {what}{others}."

    def _refusal(self, tenant: Tenant, limit: Limit, message: str) -> ApiError:
        self._pace.refuse()
        self._paces[tenant.name].refuse()
        self._on_refused(limit)
        return ApiError(
            429,
            f"{message} Please try again later.",
            code="queue_full",
            headers={"retry-after": str(self.retry_after(tenant))},
        )

    def retry_after(self, tenant: Tenant = ANONYMOUS) -> int:
        """Seconds until half of those of this tenant that wait, and all that were refused lately, can be expected to
        have had their turn. Of a tenant that has nobody waiting it is others who have to make room."""
        pace, waiting = self._paces.get(tenant.name), self.places.taken_by(tenant.name)
        if pace is None or not waiting or pace.per_second == 0.0:
            pace, waiting = self._pace, self.places.total
        rate = pace.per_second
        if rate == 0.0:
            return 1
        return max(1, min(math.ceil((waiting / 2 + pace.refusals) / rate), MAX_RETRY_AFTER))
