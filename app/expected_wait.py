"""How long a request that comes now would wait for its first token, by what is queued before it and what steps cost.

    waiting for a running slot    the requests that have to end first * what it takes the engines to end one
    prefill                       the prompts before it, and its own

Those before it are its own tenant's and, as tenants take turns by weight, as many of the others as have theirs
meanwhile. How many tokens an answer gets is unknown: it is taken to be as long as the latest answers were, or as
`max_tokens` where that is less. While no answer has ended, or no step was measured, nothing is expected.

An expectation that is wrong is put right by the waits of those who were let in: the latest waits, by what was expected
of them, multiply it. Nobody is refused while there are running slots left, so there always are such waits.

Pure bookkeeping on the event loop. Owned by `app.admission`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from app.settings import Settings
from app.tenants import Tenant
from engine.clock import Clock
from engine.scheduler.expected_work import TypicalRequest
from engine.scheduler.step_cost import StepCostTable

_MEMORY = 60.0  # seconds after which a wait counts a third
_LEAST_WAIT = 0.25  # seconds: shorter ones say nothing of a queue
_BELIEF = 5.0  # seconds of waits that came true, which the expectation begins with
_MOST_OFF = 4.0


class ExpectedWait:
    """What is known of the engines and of the latest answers. `costs` is what an engine has said last."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.costs: StepCostTable | None = None
        self.num_kv_tokens = math.inf  # that fit into the KV caches of all engines that there are at first
        self.count_engines: Callable[[], int] = lambda: settings.data_parallel_size
        self._max_num_seqs = settings.max_num_seqs
        self._engines_at_first = settings.data_parallel_size
        self._clock = clock
        self._running: Counter[str] = Counter()  # choices that have begun, by tenant
        self._num_running = 0
        self.typical = TypicalRequest()
        self._waited = self._expected = 0.0  # seconds, the latest counting most
        self._updated = clock()

    def set_costs(self, costs: StepCostTable) -> None:
        """An engine says what its steps cost."""
        self.costs = costs

    def begin(self, tenant: str) -> None:
        """A choice has its first token."""
        self._running[tenant] += 1
        self._num_running += 1

    def end(self, tenant: str) -> None:
        """A choice that has begun is over."""
        self._num_running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def learn_wait(self, waited: float, expected: float) -> None:
        """A request that was let in got its first token after so many seconds; `expected` is what `seconds` said,
        before it was put right."""
        if max(waited, expected) >= _LEAST_WAIT:
            self._forget()
            self._waited += waited
            self._expected += expected

    @property
    def correction(self) -> float:
        """Truth by expectation, of the latest."""
        self._forget()
        off = (self._waited + _BELIEF) / (self._expected + _BELIEF)
        return min(max(off, 1 / _MOST_OFF), _MOST_OFF)

    def _forget(self) -> None:
        now = self._clock()
        kept = math.exp((self._updated - now) / _MEMORY)
        self._waited *= kept
        self._expected *= kept
        self._updated = now

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
    ) -> float | None:
        """Until the last of `own` choices has begun that this tenant will have waiting, with `own_tokens` of prompts;
        others have some more, and together that weight. All who wait are taken to get that part of a typical answer.
        None where there is nothing to go by; 0 where there are running slots for all."""
        costs, typical = self.costs, self.typical
        if costs is None or not costs.is_known or not typical.num_output_tokens:
            return None
        engines = self.count_engines()
        slots = self._effective_slots(engines)
        passed = min(float(others), own * rival_weight / tenant.weight)  # others that have their turn before
        have_to_end = own + passed + self._num_running - slots
        limit = tenant.max_running or slots
        have_to_end_of_own = own + self._running[tenant.name] - limit
        if have_to_end <= 0 and have_to_end_of_own <= 0:
            return 0.0
        rows = max(1, round(min(slots, self._num_running + own + others) / engines))
        prices = typical.prices(costs, rows)
        tokens = own_tokens + (others_tokens * passed / others if others else 0.0)
        prefill = tokens * prices.prompt_token / engines
        turns = max(have_to_end / slots, have_to_end_of_own / limit, 0.0)
        waiting = own + others
        part = (part_of_answer * waiting + self._num_running) / (waiting + self._num_running)
        return turns * part * typical.num_output_tokens * prices.step + prefill

    def _effective_slots(self, engines: int) -> float:
        """Requests that run at once: fewer than there are running slots, where typical ones fill the KV caches."""
        typical = self.typical
        num_kv_tokens = self.num_kv_tokens * engines / self._engines_at_first
        fit = num_kv_tokens / max(typical.num_prompt_tokens + typical.num_output_tokens, 1.0)
        return max(min(float(self._max_num_seqs * engines), fit), self._num_running, 1.0)
