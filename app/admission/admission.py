"""Admission of requests to the queue. Used on the event loop only.

1. From its arrival, before it is tokenized, a request holds places in the queue (one per choice) and the tokens of its
   prompt. Each choice frees its part with its first output. `app.admission.tenants` describes the shares of tenants.
2. A request that does not fit is refused with 429 and a Retry-After computed from the rate at which its tenant's
   requests have been starting.
3. A tenant's requests and tokens per minute (`app.admission.rates`) are checked before the queue, and again when the
   prompt's tokens are known.
4. A request that would wait too long (`app.admission.expected_wait`) is refused with the seconds after which it would
   be admitted.
"""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush

from app.admission.expected_wait import ExpectedWait
from app.admission.rates import CountTokens, RateLimits
from app.admission.tenants import ANONYMOUS, SharedRoom, Tenant, place_reserves, token_reserves
from app.config.settings import Settings
from engine.config import Clock
from protocol.errors import ApiError

MAX_RETRY_AFTER = 60  # seconds
_MEMORY = 10.0  # seconds over which rates are averaged
_GRACE = 2.0  # seconds after its retry time during which a retry is still expected
_KEPT = 0.75  # of `max_queue_time`; while retries are expected, only they may wait longer than this
_MAX_RETRIES = 10_000


class Limit(enum.StrEnum):
    """The reason for a refusal, as the metrics label it."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    TENANT = "tenant_max_queued_requests"
    DEADLINE = "first_token_deadline"
    TIME = "max_queue_time"
    BACKGROUND = "max_background_responses"
    REQUEST_RATE = "requests_per_minute"
    TOKEN_RATE = "tokens_per_minute"  # noqa: S105 - no password


class DrainRate:
    """The drain rate of a queue and its number of recent refusals, both decaying with age.

    The rate is starts per second in which the queue was not empty. On a quiet server few requests start because few
    arrive, so starts per second of all time would not predict how long the next request waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._starts = 0.0
        self._seconds = 0.0  # in which the queue was not empty
        self.refusals = 0.0
        self._updated = self._clock()

    def advance(self, *, waiting: bool) -> None:
        """Account for the time until now; `waiting` if the queue was not empty. Must be called before it changes."""
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
        """Choices that start per second; 0 if none has started yet."""
        return self._starts / self._seconds if self._seconds > 0.0 else 0.0


class ExpectedRetries:
    """The expected retries of refused requests, ordered by the time that their Retry-After gave.

    Without them, clients that retry at once would take every place that becomes free, and clients that honor
    Retry-After would be refused for ever.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: list[float] = []  # a heap

    def __len__(self) -> int:
        """Return the number of expected retries, after dropping those more than `_GRACE` seconds late."""
        while self._times and self._times[0] < self._clock() - _GRACE:
            heappop(self._times)
        return len(self._times)

    def expect(self, seconds: float) -> None:
        if len(self._times) < _MAX_RETRIES:
            heappush(self._times, self._clock() + seconds)

    def claim(self) -> bool:
        """Count a new request as the earliest expected retry. Return False if none is due yet."""
        if not len(self) or self._times[0] > self._clock():
            return False
        heappop(self._times)
        return True


class QueueTicket:
    """A request's place in the queue. `answer` is the expected length of each choice's answer, as a fraction of a
    typical answer; `expected` is the estimated wait in seconds, None without an estimate."""

    def __init__(
        self, admission: Admission, tenant: Tenant, choices: int, tokens: int, answer: float, expected: float | None
    ) -> None:
        self.tenant = tenant
        self.choices = choices  # that wait for their first output
        self.tokens = tokens
        self.running = 0  # choices that have begun and not ended
        self.answer = answer
        self.expected = expected
        self.since = admission.clock()
        self.progress = admission.wait.progress
        self.step = admission.wait.step  # seconds of one step when `expected` was computed
        self.prompt_tokens = 0  # of each choice; 0 before the prompt is tokenized
        self.generates = True
        self._admission = admission
        self._count: CountTokens | None = None
        self._taken = 0  # prompt tokens that count against the limits per minute

    def count_tokens(self, tokens: int) -> None:
        """Replace the estimated number of prompt tokens by the count. Must be called before any choice begins. Raises
        ApiError 429 for the tenant's limits per minute."""
        self._admission.rates.take(self.tenant, tokens, self._admission.on_refused_rate)
        self._taken = tokens
        if self.choices:
            self._admission.tokens.take(self.tenant.name, tokens - self.tokens)
            self.tokens = tokens
            self.prompt_tokens = tokens // self.choices

    def attend(self, count: CountTokens) -> None:
        """Count the tokens that the request generates from now on against its tenant's limit per minute."""
        self._count = count
        self._admission.rates.attend(self.tenant, count)

    def begin(self) -> None:
        """Take a choice that has its first output out of the queue, with its part of the tokens."""
        if self.choices:
            self._admission.release(self, 1, self.tokens // self.choices, started=True)
            self.running += 1

    def end(self, num_output_tokens: int) -> None:
        """Record that a running choice has ended with `num_output_tokens`."""
        if self.running:
            self.running -= 1
            self._admission.ended(self, num_output_tokens)

    def leave(self) -> None:
        """Free the places and tokens that are still held, and end the running choices. Idempotent. Called at the end of
        the request's scope. A request that was refused before the engine got it uses nothing of the limits per minute.
        """
        if self.choices:
            self._admission.release(self, self.choices, self.tokens, started=False)
        while self.running:
            self.running -= 1
            self._admission.wait.end(self.tenant)
        if self._count is not None:
            self._admission.rates.leave(self.tenant, self._count)
        elif self._taken:
            self._admission.rates.give_back(self.tenant, self._taken)
            self._taken = 0


class Admission:
    """The accounting of the queue. Its limits count choices that wait for their first output, and their prompt tokens.

    `tenants` are all tenants of the server. `on_refused` is called at every refusal with 429. `on_waited` is called at
    the first token of a request, with the seconds that it waited and the seconds that it was expected to wait. Several
    queues may share the tenants' `rates`.
    """

    def __init__(
        self,
        settings: Settings,
        on_refused: Callable[[Limit], None] = lambda limit: None,
        tenants: Collection[Tenant] = (ANONYMOUS,),
        clock: Clock = time.monotonic,
        on_waited: Callable[[float, float], None] = lambda waited, expected: None,
        rates: RateLimits | None = None,
    ) -> None:
        self.clock = clock
        self.wait = ExpectedWait(settings, clock)
        self.rates = rates or RateLimits(clock)
        self.on_refused_rate = lambda kind: on_refused(Limit(f"{kind}_per_minute"))
        self._max_queue_time = settings.max_queue_time or math.inf
        # The expected length of all queued choices' answers, in typical answers, by tenant.
        self._answers: defaultdict[str, float] = defaultdict(float)
        self._waiting_weight = 0.0  # of all tenants with queued choices together
        self._weights: dict[str, float] = {}  # of each tenant with queued choices
        self._on_waited = on_waited
        self.places = SharedRoom(settings.max_queued_requests, {})
        self.tokens = SharedRoom(settings.max_queued_tokens, {})
        self.set_tenants(tenants)
        self._num_waiting_tenants = 0
        self._on_refused = on_refused
        self._drain_rate = DrainRate(clock)  # of all tenants together
        self._drain_rates: dict[str, DrainRate] = {}
        self._retries: defaultdict[str, ExpectedRetries] = defaultdict(lambda: ExpectedRetries(clock))

    def set_tenants(self, tenants: Collection[Tenant]) -> None:
        """Replace the tenants. Queued requests keep their places."""
        self.places.keep(place_reserves(self.places.limit, tenants))
        self.tokens.keep(token_reserves(self.tokens.limit, tenants))
        self._num_tenants = len(tenants)

    @property
    def is_full(self) -> bool:
        """Return True if a new request of any tenant would be refused."""
        all_tenants_wait = self._num_waiting_tenants >= self._num_tenants
        return self.places.is_full or (all_tenants_wait and self.tokens.is_full)

    @contextmanager
    def queue(
        self, tenant: Tenant, choices: int, tokens: int, timeout: float | None, max_tokens: int | None = None
    ) -> Iterator[QueueTicket]:
        """Hold a place in the queue. `timeout` is the number of seconds until the first token must be there,
        `max_tokens` the limit of output tokens per choice, None for as many as fit.

        Raises ApiError 429 if the tenant's rate is used up, the queue is full or the request would start too late, and
        400 if the request has more choices than could ever wait.
        """
        self.rates.check(tenant, self.on_refused_rate)
        self._advance(tenant)
        answer = self.wait.typical_of(tenant).part_of_answer(max_tokens)
        expected = self._expected(tenant, 1, tokens, answer)
        self._check(tenant, choices, tokens, timeout, expected)
        ticket = QueueTicket(self, tenant, choices, tokens, answer, expected)
        ticket.generates = max_tokens != 0
        self._count_tenant(tenant, 1)
        self._answers[tenant.name] += choices * answer
        self.places.take(tenant.name, choices)
        self.tokens.take(tenant.name, tokens)
        try:
            yield ticket
        finally:
            ticket.leave()

    @contextmanager
    def unqueued(self, tenant: Tenant) -> Iterator[QueueTicket]:
        """Count a row of a batch against its tenant's limits per minute. It takes no place in the queue, and estimates
        leave it out. Raises ApiError 429."""
        self.rates.check(tenant, self.on_refused_rate)
        ticket = QueueTicket(self, tenant, 0, 0, 0.0, None)
        try:
            yield ticket
        finally:
            ticket.leave()

    def release(self, ticket: QueueTicket, choices: int, tokens: int, *, started: bool) -> None:
        """Free a part of a ticket. Only the ticket calls this."""
        name = ticket.tenant.name
        self._advance(ticket.tenant)
        ticket.choices -= choices
        ticket.tokens -= tokens
        self.places.take(name, -choices)
        self.tokens.take(name, -tokens)
        self._answers[name] -= choices * ticket.answer
        if not self.places.taken_by(name):
            del self._answers[name]
        self._count_tenant(ticket.tenant, -1)
        if started:
            self._drain_rate.start(choices)
            self._drain_rates[name].start(choices)
            self.wait.begin(ticket.tenant)
            if ticket.expected is not None:
                self._on_waited(self.clock() - ticket.since, ticket.expected * self.wait.correction_of(name))
                step = self.wait.step
                steps = self.wait.progress - ticket.progress
                self.wait.learn_wait(steps * step, ticket.expected / ticket.step * step, name)
                ticket.expected = None  # the estimate is compared at the first choice only

    def ended(self, ticket: QueueTicket, num_output_tokens: int) -> None:
        """End a running choice of a ticket. Only the ticket calls this."""
        self.wait.end(ticket.tenant)
        if num_output_tokens and ticket.generates:
            self.wait.learn_answer(ticket.tenant, ticket.prompt_tokens, num_output_tokens)

    def _count_tenant(self, tenant: Tenant, change: int) -> None:
        """Add a tenant to the waiting tenants (`change` 1), before it takes its first place, or remove it (-1)."""
        if not self.places.taken_by(tenant.name):
            self._num_waiting_tenants += change
            if change > 0:
                self._weights[tenant.name] = tenant.weight  # a reload may change it while the tenant waits
                self._waiting_weight += tenant.weight
            else:
                self._waiting_weight -= self._weights.pop(tenant.name)
                if not self._weights:
                    self._waiting_weight = 0.0

    def _expected(self, tenant: Tenant, choices: int, tokens: int, answer: float) -> float | None:
        """Return the estimated seconds until the last of these new choices has its first token; None if unknown."""
        name = tenant.name
        own, own_tokens = self.places.taken_by(name), self.tokens.taken_by(name)
        others = self.places.total - own
        return self.wait.seconds(
            tenant,
            own=own + choices,
            own_tokens=own_tokens + tokens,
            others=others,
            others_tokens=self.tokens.total - own_tokens,
            rival_weight=max(0.0, self._waiting_weight - self._weights.get(name, 0.0)),
            waiting_tenants=self._weights,
            part_of_answer=(self._answers[name] + choices * answer) / (own + choices),
        )

    @property
    def queued_seconds(self) -> float:
        """The estimated seconds until all queued choices have begun; 0 if unknown."""
        total = self.places.total
        if not total:
            return 0.0
        seconds = self.wait.seconds_of_all(
            waiting=total, tokens=self.tokens.total, part_of_answer=sum(self._answers.values()) / total
        )
        return self.wait.correction * (seconds or 0.0)

    def _advance(self, tenant: Tenant) -> None:
        self._drain_rate.advance(waiting=self.places.total > 0)
        drain = self._drain_rates.setdefault(tenant.name, DrainRate(self.clock))
        drain.advance(waiting=self.places.taken_by(tenant.name) > 0)

    def _check(self, tenant: Tenant, choices: int, tokens: int, timeout: float | None, expected: float | None) -> None:
        name = tenant.name
        own_limit = math.inf if tenant.max_queued_requests is None else tenant.max_queued_requests
        possible = min(own_limit, self.places.most_for(name))
        if choices > possible:  # it would be refused for ever
            message = f"The request asks for {choices} choices; at most {possible} can wait. Send fewer in one request."
            raise ApiError(400, message, param="n")
        own = self.places.taken_by(name)
        if own + choices > own_limit:
            raise self._refusal(tenant, Limit.TENANT, f"Your queue is full: {own} of {own_limit} places are taken.")
        if not self.places.fits(name, choices):
            raise self._refusal(tenant, Limit.REQUESTS, self._full(self.places, name, "places are taken"))
        # A tenant without queued requests is admitted with a prompt of any length. The prompt may be longer than the
        # tenant's reserve or even than the limit, so it might never fit while other tenants keep the queue full.
        if own and not self.tokens.fits(name, tokens):
            raise self._refusal(tenant, Limit.TOKENS, self._full(self.tokens, name, "prompt tokens wait"))
        rate = self._drain_rates[name].per_second  # the tenant's own: no tenant waits for the queue of another
        if expected is not None:
            expected *= self.wait.correction_of(name)
        elif rate > 0:
            expected = own / rate
        if expected is None:
            return
        if timeout is not None and own and expected > max(timeout, 0.0):
            raise self._refusal(
                tenant,
                Limit.DEADLINE,
                f"The queue is too long for a first token within {timeout:g} s: {own} wait, and the first token is "
                f"expected after {expected:.2g} s.",
            )
        retries, kept = self._retries[name], _KEPT * self._max_queue_time
        if expected > self._max_queue_time or (expected > kept and len(retries) and not retries.claim()):
            again = expected - kept + (len(retries) / rate if rate else 0.0)
            refusal = self._refusal(
                tenant,
                Limit.TIME,
                f"The queue is too long: the first token is expected after {expected:.0f} s, and at most "
                f"{self._max_queue_time:g} s are allowed, less while other refused clients are due to retry.",
                again,
            )
            retries.expect(float(refusal.headers["retry-after"]))
            raise refusal

    @staticmethod
    def _full(room: SharedRoom, tenant: str, what: str) -> str:
        kept = room.kept_from(tenant)
        others = f", {room.taken_by(tenant)} of them yours, and {kept} are kept for other tenants" if kept else ""
        return f"The queue is full: {room.total} of {room.limit} {what}{others}."

    def _refusal(self, tenant: Tenant, limit: Limit, message: str, again: float | None = None) -> ApiError:
        """Count a refusal and return its error. `again` is the Retry-After in seconds, None to compute it."""
        seconds = self.retry_after(tenant) if again is None else max(1, min(math.ceil(again), MAX_RETRY_AFTER))
        self._drain_rate.refuse()
        self._drain_rates[tenant.name].refuse()
        self._on_refused(limit)
        return ApiError(
            429, f"{message} Please try again later.", code="queue_full", headers={"retry-after": str(seconds)}
        )

    def retry_after(self, tenant: Tenant = ANONYMOUS) -> int:
        """Return the seconds in which half of the tenant's queued choices and all its recently refused requests would
        start. A tenant without queued choices gets the figures of all tenants, which hold the places that it needs."""
        drain, waiting = self._drain_rates.get(tenant.name), self.places.taken_by(tenant.name)
        if drain is None or not waiting or drain.per_second == 0.0:
            drain, waiting = self._drain_rate, self.places.total
        rate = drain.per_second
        if rate == 0.0:
            return 1
        return max(1, min(math.ceil((waiting / 2 + drain.refusals) / rate), MAX_RETRY_AFTER))
