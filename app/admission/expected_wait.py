"""Estimate the seconds until the first token of a new request, from the queue and the measured cost of steps:

    waiting for a running slot    number of the tenant's requests that must end first * seconds per ended request
    prefill                       the prompts queued before it and its own prompt

The engines share running slots between tenants by weight: a tenant with fewer slots than its share takes slots from
tenants with more. So a tenant waits only for its own requests, on its share of the slots and on slots that no other
tenant asks for. The length of an answer is unknown: the estimate is the length of the tenant's latest answers, or
`max_tokens` if that is less. There is no estimate before an answer has ended and a step was measured.

The waits of admitted requests correct the estimate: it is multiplied by the ratio of the tenant's latest waits to their
estimates. No request is refused while running slots are free, so there are always such waits. Waits and estimates are
counted in steps (`ExpectedWait.progress`), because steps may become slower or faster while a request waits: counted in
seconds, one minute in which the machine was busy would cause refusals for several minutes more.

A tenant without ended answers, or without measured waits, gets the figures of all tenants together.

Used on the event loop only, by `app.admission.admission`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from app.admission.tenants import Tenant
from app.config.settings import Settings
from engine.config import Clock
from engine.costs.table import StepCostTable, StepLoad, TypicalRequest

_MEMORY = 60.0  # seconds after which a wait counts a third as much
_LEAST_WAIT = 0.25  # seconds: shorter waits say nothing about a queue
_BELIEF = 5.0  # seconds added to both sums: the correction starts at 1 and moves only as real waits add up
_MOST_OFF = 4.0  # the correction is at most this, and at least 1 / this


class Waits:
    """The latest waits and their estimates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited = self._expected = 0.0  # sums in seconds that decay with age
        self._updated = clock()

    def learn(self, waited: float, expected: float) -> None:
        self._forget()
        self._waited += waited
        self._expected += expected

    @property
    def correction(self) -> float:
        """The ratio of the latest waits to their estimates."""
        self._forget()
        off = (self._waited + _BELIEF) / (self._expected + _BELIEF)
        return min(max(off, 1 / _MOST_OFF), _MOST_OFF)

    def _forget(self) -> None:
        now = self._clock()
        kept = math.exp((self._updated - now) / _MEMORY)
        self._waited *= kept
        self._expected *= kept
        self._updated = now


class ExpectedWait:
    """The state from which waits are estimated. `costs` is the table that an engine sent last, `typical` the typical
    request of all tenants together."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.costs: StepCostTable | None = None
        self.num_kv_tokens = math.inf  # capacity of the KV caches of all engines started first, together
        self.count_engines: Callable[[], int] = lambda: settings.data_parallel_size
        self._max_num_seqs = settings.max_num_seqs
        self._engines_at_first = settings.data_parallel_size
        self._clock = clock
        self._running: dict[str, tuple[int, float]] = {}  # choices that have begun, and the weight, by tenant
        self._num_running = 0
        self.typical = TypicalRequest()
        self._typical_of: dict[str, TypicalRequest] = {}
        self._waits = Waits(clock)
        self._waits_of: dict[str, Waits] = {}
        self._progress = 0.0
        self._advanced = clock()

    def set_costs(self, costs: StepCostTable) -> None:
        """Replace the table of step costs by the one an engine sent."""
        self._progress, self._advanced = self.progress, self._clock()
        self.costs = costs

    @property
    def step(self) -> float:
        """The seconds of a step with all running slots and some prefill, a measure of the engines' speed; 1 if no cost
        is known."""
        load = StepLoad(self._max_num_seqs, 0, 1, 128)
        return (self.costs.cost(load) if self.costs is not None else 0.0) or 1.0

    @property
    def progress(self) -> float:
        """The time since the start, counted in steps of the length of `step`."""
        return self._progress + (self._clock() - self._advanced) / self.step

    def begin(self, tenant: Tenant) -> None:
        """Count a choice that has its first token as running."""
        self._count(tenant, 1)

    def end(self, tenant: Tenant) -> None:
        """Stop counting a running choice."""
        self._count(tenant, -1)

    def _count(self, tenant: Tenant, change: int) -> None:
        self._num_running += change
        count = self._num_running_of(tenant) + change
        if count:
            self._running[tenant.name] = count, tenant.weight
        else:
            self._running.pop(tenant.name, None)

    def _num_running_of(self, tenant: Tenant) -> int:
        return self._running.get(tenant.name, (0, 0.0))[0]

    def learn_answer(self, tenant: Tenant, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the answer of a choice that ended by itself."""
        self.typical.learn(num_prompt_tokens, num_output_tokens)
        own = self._typical_of.setdefault(tenant.name, TypicalRequest())
        own.learn(num_prompt_tokens, num_output_tokens)

    def typical_of(self, tenant: Tenant) -> TypicalRequest:
        """Return the typical request of this tenant, or of all tenants if none of its answers has ended."""
        return self._typical_of.get(tenant.name, self.typical)

    def learn_wait(self, waited: float, expected: float, tenant: str = "") -> None:
        """Record that an admitted request got its first token after `waited` seconds. `expected` is the uncorrected
        estimate of `seconds`. Both are converted to seconds at the present speed of steps."""
        if max(waited, expected) >= _LEAST_WAIT:
            self._waits.learn(waited, expected)
            self._waits_of.setdefault(tenant, Waits(self._clock)).learn(waited, expected)

    @property
    def correction(self) -> float:
        """The latest waits of all tenants, divided by their estimates."""
        return self._waits.correction

    def correction_of(self, tenant: str) -> float:
        """Return the tenant's latest waits divided by their estimates; without any, those of all tenants."""
        return self._waits_of.get(tenant, self._waits).correction

    def seconds(
        self,
        tenant: Tenant,
        *,
        own: int,
        own_tokens: int,
        part_of_answer: float,
        others: int = 0,
        others_tokens: int = 0,
        rival_weight: float = 0.0,
        waiting_tenants: Collection[str] = (),
    ) -> float | None:
        """Return the seconds until the last of this tenant's `own` queued choices, with `own_tokens` prompt tokens, has
        begun. None without data to estimate from; 0 if there are running slots for all.

        Other tenants have `others` queued choices, and `rival_weight` together; `waiting_tenants` are the names of all
        tenants with queued choices. The tenant's choices are expected to generate `part_of_answer` of its typical
        answer.
        """
        running = self._num_running_of(tenant)
        others_running = self._num_running - running
        passed = min(float(others), own * rival_weight / tenant.weight)  # other tenants' choices that start before
        for name, (_, weight) in self._running.items():
            rival_weight += weight if name != tenant.name and name not in waiting_tenants else 0.0
        slots = self._effective_slots(self.count_engines())
        its_slots = max(slots * tenant.weight / (tenant.weight + rival_weight), slots - others_running - others)
        its_slots = min(its_slots, tenant.max_running or math.inf)
        tokens = own_tokens + (others_tokens * passed / others if others else 0.0)
        return self._seconds(self.typical_of(tenant), its_slots, own, running, tokens, part_of_answer, others)

    def seconds_of_all(self, *, waiting: int, tokens: int, part_of_answer: float) -> float | None:
        """Return the seconds until the queued choices of all tenants have begun."""
        slots = self._effective_slots(self.count_engines())
        return self._seconds(self.typical, slots, waiting, self._num_running, tokens, part_of_answer, 0)

    def _seconds(
        self,
        typical: TypicalRequest,
        slots: float,
        waiting: int,
        running: int,
        tokens: float,
        part_of_answer: float,
        others: int,
    ) -> float | None:
        """Return the seconds until the last of `waiting` choices has begun, on `slots` slots with `running` choices."""
        costs = self.costs
        if costs is None or not costs.is_known or not typical.num_output_tokens:
            return None
        have_to_end = waiting + running - slots
        if have_to_end <= 0:
            return 0.0
        engines = self.count_engines()
        rows = max(1, round(min(self._effective_slots(engines), self._num_running + waiting + others) / engines))
        prices = self.typical.prices(costs, rows)
        part = (part_of_answer * waiting + running) / (waiting + running)
        prefill = tokens * prices.prompt_token / engines
        return have_to_end / slots * part * typical.num_output_tokens * prices.step + prefill

    def _effective_slots(self, engines: int) -> float:
        """Return how many requests run at once: the running slots, or fewer if typical requests fill the KV caches."""
        typical = self.typical
        num_kv_tokens = self.num_kv_tokens * engines / self._engines_at_first
        fit = num_kv_tokens / max(typical.num_prompt_tokens + typical.num_output_tokens, 1.0)
        return max(min(float(self._max_num_seqs * engines), fit), self._num_running, 1.0)
