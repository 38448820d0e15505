"""Who may queue: the server says no early, cheaply and with a time to come back, instead of late.

A request takes places in the queue (one per choice) and tokens (its prompt, once per prompt) from its arrival, before
anything is tokenized; each choice gives its part back with its first output. Tenants share both by
`app.admission.tenants`. What does not fit is refused with 429 and a Retry-After from the rate at which its tenant's
requests have been starting; what would wait too long (`app.admission.expected_wait`), with the seconds after which it
would not. Belongs to the event loop.
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
from app.admission.tenants import ANONYMOUS, SharedRoom, Tenant, place_reserves, token_reserves
from app.config.settings import Settings
from engine.config import Clock
from protocol.errors import ApiError

MAX_RETRY_AFTER = 60  # seconds
_MEMORY = 10.0  # seconds over which rates are averaged
_GRACE = 2.0  # seconds that a place is left to who was told to come back
_KEPT = 0.75  # of `max_queue_time`: what is beyond is left to them
_MAX_RETURNS = 10_000


class Limit(enum.StrEnum):
    """What a request was refused for, in the words of the metrics."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    TENANT = "tenant_max_queued_requests"
    DEADLINE = "first_token_deadline"
    TIME = "max_queue_time"
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


class Returns:
    """Those who were refused, by the time at which they were told to come back.

    A client that asks again the moment it is answered would else take each place that becomes free, and those who do as
    they were told would come in vain for ever.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: list[float] = []  # a heap

    def __len__(self) -> int:
        """How many are expected."""
        while self._times and self._times[0] < self._clock() - _GRACE:
            heappop(self._times)
        return len(self._times)

    def expect(self, seconds: float) -> None:
        """One was told to come back after so long."""
        if len(self._times) < _MAX_RETURNS:
            heappush(self._times, self._clock() + seconds)

    def claim(self) -> bool:
        """Somebody comes. Returns whether one was expected now, whom this is taken for."""
        if not len(self) or self._times[0] > self._clock():
            return False
        heappop(self._times)
        return True


class QueueTicket:
    """A request's place in the queue. `begin` is called with the first output of each choice, `end` when it has ended,
    `leave` when its scope is left. `answer` is how much of a typical answer each choice is taken to get, `expected` the
    seconds that it was expected to wait, None where nothing was known."""

    def __init__(
        self, admission: Admission, tenant: Tenant, choices: int, tokens: int, answer: float, expected: float | None
    ) -> None:
        self.tenant = tenant
        self.choices = choices  # that wait
        self.tokens = tokens
        self.running = 0  # choices that have begun and not ended
        self.answer = answer
        self.expected = expected
        self.since = admission.clock()
        self.progress = admission.wait.progress
        self.step = admission.wait.step  # seconds of one step when `expected` was computed
        self.prompt_tokens = 0  # of each choice, once they are counted
        self.generates = True
        self._admission = admission

    def count_tokens(self, tokens: int) -> None:
        """The prompt has been tokenized: the estimate becomes a count. Nothing has begun yet."""
        if self.choices:
            self._admission.tokens.take(self.tenant.name, tokens - self.tokens)
            self.tokens = tokens
            self.prompt_tokens = tokens // self.choices

    def begin(self) -> None:
        """A choice got its first output, and leaves the queue with its part of the tokens."""
        if self.choices:
            self._admission.release(self, 1, self.tokens // self.choices, started=True)
            self.running += 1

    def end(self, num_output_tokens: int) -> None:
        """A choice that has begun has ended, with so many tokens."""
        if self.running:
            self.running -= 1
            self._admission.ended(self, num_output_tokens)

    def leave(self) -> None:
        """Give back what is left. Idempotent."""
        if self.choices:
            self._admission.release(self, self.choices, self.tokens, started=False)
        while self.running:
            self.running -= 1
            self._admission.wait.end(self.tenant)


class Admission:
    """The queue's accounting. Limits count choices and prompt tokens that wait for their first output.

    `tenants` are all there are. `on_refused` is told of every refusal that is answered with 429, `on_waited` of every
    request that got its first token, how long it had waited and how long it was expected to.
    """

    def __init__(
        self,
        settings: Settings,
        on_refused: Callable[[Limit], None] = lambda limit: None,
        tenants: Collection[Tenant] = (ANONYMOUS,),
        clock: Clock = time.monotonic,
        on_waited: Callable[[float, float], None] = lambda waited, expected: None,
    ) -> None:
        self.clock = clock
        self.wait = ExpectedWait(settings, clock)
        self._max_queue_time = settings.max_queue_time or math.inf
        # The expected length of all queued choices' answers, in typical answers, by tenant.
        self._answers: defaultdict[str, float] = defaultdict(float)
        self._waiting_weight = 0.0  # of the tenants that have somebody waiting
        self._weights: dict[str, float] = {}  # of each tenant with queued choices
        self._on_waited = on_waited
        self.places = SharedRoom(settings.max_queued_requests, {})
        self.tokens = SharedRoom(settings.max_queued_tokens, {})
        self.set_tenants(tenants)
        self._num_waiting_tenants = 0
        self._on_refused = on_refused
        self._clock = clock
        self._pace = Pace(clock)  # of all together
        self._paces: dict[str, Pace] = {}
        self._returns: defaultdict[str, Returns] = defaultdict(lambda: Returns(clock))

    def set_tenants(self, tenants: Collection[Tenant]) -> None:
        """These are all there are, from now on. Who waits keeps its place."""
        self.places.keep(place_reserves(self.places.limit, tenants))
        self.tokens.keep(token_reserves(self.tokens.limit, tenants))
        self._num_tenants = len(tenants)

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused, whose ever it is."""
        everybody_waits = self._num_waiting_tenants >= self._num_tenants
        return self.places.is_full or (everybody_waits and self.tokens.is_full)

    @contextmanager
    def queue(
        self, tenant: Tenant, choices: int, tokens: int, timeout: float | None, max_tokens: int | None = None
    ) -> Iterator[QueueTicket]:
        """Hold a place in the queue. `timeout` is how many seconds the request has to its first token, `max_tokens` how
        many tokens a choice may get, None for as many as fit.

        Raises ApiError 429 when there is no place, or none from which it could start in time, and 400 when there
        could never be one.
        """
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

    def release(self, ticket: QueueTicket, choices: int, tokens: int, *, started: bool) -> None:
        """Called by a QueueTicket, for a part of it."""
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
            self._pace.start(choices)
            self._paces[name].start(choices)
            self.wait.begin(ticket.tenant)
            if ticket.expected is not None:
                self._on_waited(self.clock() - ticket.since, ticket.expected * self.wait.correction_of(name))
                step = self.wait.step
                steps = self.wait.progress - ticket.progress
                self.wait.learn_wait(steps * step, ticket.expected / ticket.step * step, name)
                ticket.expected = None  # of the first choice only

    def ended(self, ticket: QueueTicket, num_output_tokens: int) -> None:
        """Called by a QueueTicket, for a choice that had begun."""
        self.wait.end(ticket.tenant)
        if num_output_tokens and ticket.generates:
            self.wait.learn_answer(ticket.tenant, ticket.prompt_tokens, num_output_tokens)

    def _count_tenant(self, tenant: Tenant, change: int) -> None:
        """The tenant is about to have its first choice waiting, or has none any more."""
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
        """Seconds to the first token of the last of these choices, as the table of step costs has it."""
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
        """What it takes, as far as is known, until all who wait now have begun."""
        total = self.places.total
        if not total:
            return 0.0
        seconds = self.wait.seconds_of_all(
            waiting=total, tokens=self.tokens.total, part_of_answer=sum(self._answers.values()) / total
        )
        return self.wait.correction * (seconds or 0.0)

    def _advance(self, tenant: Tenant) -> None:
        self._pace.advance(waiting=self.places.total > 0)
        pace = self._paces.setdefault(tenant.name, Pace(self._clock))
        pace.advance(waiting=self.places.taken_by(tenant.name) > 0)

    def _check(self, tenant: Tenant, choices: int, tokens: int, timeout: float | None, expected: float | None) -> None:
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
                f"The queue is too long for a first token within {timeout:g} s: {own} wait, and it is expected to take "
                f"{expected:.2g} s.",
            )
        returns, kept = self._returns[name], _KEPT * self._max_queue_time
        if expected > self._max_queue_time or (expected > kept and len(returns) and not returns.claim()):
            again = expected - kept + (len(returns) / rate if rate else 0.0)
            refusal = self._refusal(
                tenant,
                Limit.TIME,
                f"The queue is too long: {expected:.0f} s are expected to pass until the first token, and "
                f"{self._max_queue_time:g} s may, less while others were told to come back.",
                again,
            )
            returns.expect(float(refusal.headers["retry-after"]))
            raise refusal

    @staticmethod
    def _full(room: SharedRoom, tenant: str, what: str) -> str:
        kept = room.kept_from(tenant)
        others = f", {room.taken_by(tenant)} of them yours, and {kept} are kept for other tenants" if kept else ""
        return f"The queue is full: {room.total} of {room.limit} {what}{others}."

    def _refusal(self, tenant: Tenant, limit: Limit, message: str, again: float | None = None) -> ApiError:
        """`again` is in how many seconds it would not be refused, if that is known."""
        seconds = self.retry_after(tenant) if again is None else max(1, min(math.ceil(again), MAX_RETRY_AFTER))
        self._pace.refuse()
        self._paces[tenant.name].refuse()
        self._on_refused(limit)
        return ApiError(
            429,
            f"{message} Please try again later.",
            code="queue_full",
            headers={"retry-after": str(seconds)},
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
