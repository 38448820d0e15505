"""Step costs, expert load and profiles: what acts around each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.commands import Profile
from engine.config import Clock, EngineConfig
from engine.costs.lost_time import LostTime
from engine.costs.measuring import Calibration, StepCostTracker
from engine.costs.table import StepBudget, StepCostTable, StepLoad, chunk_keys
from engine.errors import ProfileTooLarge
from engine.executor import MAX_PROFILE_BYTES, STEPS_BETWEEN_EXPERT_LOADS, CountsExperts, Executor, Profiles
from engine.plan import SchedulerOutput
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.snapshot import StepSnapshot

logger = logging.getLogger(__name__)

STEPS_BETWEEN_NEWS = 256  # after which the front end is told anew, in the beginning sooner
FIRST_LOOKS = 32  # so many steps, from the first on, are looked at all
DECODES_PER_LOOK = 8  # steps of decodes alone of which one is looked at afterwards
STEPS_BETWEEN_CHANGES = 16  # steps after which a table that has changed much is sent to the front end again
MUCH = 0.2  # the sum of changes, as natural logarithms of factors


class StepCosts:
    """The table, who keeps it up to date, and who asks it within the core.

    `table` is what is known already. It learns from the steps unless it is the very truth. Where somebody wants to
    `keep` it, which is called at the end at the latest, and nothing is known, costs are measured while there is no
    work.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        table: StepCostTable | None,
        *,
        learns: bool = True,
        keep: Callable[[StepCostTable], None] | None = None,
    ) -> None:
        self.table = table or StepCostTable.unknown(config.max_num_seqs, config.max_num_batched_tokens)
        self.prefill_tokens = config.max_num_batched_tokens  # of the latest step that had to be paced
        self._config = config
        self._scheduler = scheduler
        self._tracker = StepCostTracker(self.table) if learns else None
        self._budget = StepBudget(self.table, config.max_num_batched_tokens, config.target_inter_token_latency)
        self._keep = keep
        self._calibration: Calibration | None = None
        self._num_steps = 0
        self._due = 1  # the step after which the front end is told
        self._told_at = 0
        self._changes_told = 0.0
        self._lost_time: LostTime | None = None
        self._tell_scheduler()
        if self.table.is_known:
            logger.info("Step costs of an earlier start: %s", self.table.summary)

    def measure_on(self, executor: Executor, clock: Clock) -> None:
        """Learn from the steps of this executor. Measure while there is no work, if the settings ask for it."""
        self._lost_time = LostTime(executor)
        if self._keep is not None and self._tracker is not None and not self.table.is_complete:
            pool = self._scheduler.kv.pool
            self._calibration = Calibration(executor, self._config, pool, self._tracker, self._lost_time, clock)

    @property
    def is_measuring(self) -> bool:
        return self._calibration is not None

    def measure(self) -> None:
        """Make one made-up step."""
        assert self._calibration is not None
        try:
            if not self._calibration.step():
                self.end_measuring()
        except Exception:  # real steps tell, too
            logger.warning("what steps cost could not be measured", exc_info=True)
            self.end_measuring()

    def end_measuring(self) -> None:
        """All has been measured, or somebody wants something."""
        calibration, self._calibration = self._calibration, None
        if calibration is not None and self.table.is_known:
            logger.info("Step costs, measured in %.1f s: %s", calibration.seconds, self.table.summary)
            self._due = 0
            self._tell_scheduler()
            self.keep()

    def observe(self, plan: SchedulerOutput, num_prefill_tokens: int, seconds: float) -> None:
        """A step took so long, with what the host did before it. It is yet to be accounted for: its requests are where
        it found them."""
        if self._tracker is None:
            return
        self._num_steps += 1
        # A look takes a tenth of what a fast device's step does on the host. Steps of decodes alone come by thousands.
        was_held_up = self._lost_time is not None and self._lost_time.was_held_up(seconds)
        if was_held_up:
            return
        if num_prefill_tokens or self._num_steps <= FIRST_LOOKS or not self._num_steps % DECODES_PER_LOOK:
            self._tracker.observe(_load(plan, self._scheduler.requests), seconds)
            if num_prefill_tokens:
                self._tell_scheduler()

    def pace_prefill(self, decodes: StepLoad, start: int) -> int:
        """How many tokens of prompts a step may carry beside these decodes, the first of them at this position."""
        self.prefill_tokens = self._budget.prefill_tokens(decodes, start)
        return self.prefill_tokens

    def _tell_scheduler(self) -> None:
        """What a token of a prompt takes, for deadlines and for whether loading is cheaper than computing."""
        self.seconds_per_prefill_token = self.table.seconds_per_prefill_token
        if self._scheduler.kv.tiers is not None:
            self._scheduler.kv.tiers.seconds_per_token = self.table.seconds_per_prompt_token

    def are_news(self, num_steps: int) -> bool:
        """Return True if the table should be sent to the front end after so many steps: now and then, and soon after it
        has changed much, because the front end refuses requests by it."""
        due = self._due
        if self._tracker is not None and self._tracker.changes - self._changes_told > MUCH:
            due = min(due, self._told_at + STEPS_BETWEEN_CHANGES)
        return num_steps >= due and self.table.is_known

    def tell(self, num_steps: int) -> bytes:
        """The table for the front end."""
        self._due = num_steps + max(1, min(num_steps, STEPS_BETWEEN_NEWS))
        self._told_at, self._changes_told = num_steps, self._tracker.changes if self._tracker is not None else 0.0
        return self.table.to_json()

    def keep(self) -> None:
        if self._keep is not None and self.table.is_known:
            self._keep(self.table.settled())


def _load(plan: SchedulerOutput, requests: Mapping[str, Request]) -> StepLoad:
    """What a step computes. Of a request that has ended since it was planned, nobody knows any more how far it was."""
    decodes = decode_keys = prefills = tokens = keys = 0
    scheduled = zip(plan.request_ids, plan.num_scheduled_tokens, plan.num_sampled_tokens, strict=True)
    for request_id, num_tokens, num_sampled in scheduled:
        request = requests.get(request_id)
        own = chunk_keys(0 if request is None else request.num_computed_tokens, num_tokens)
        if num_tokens == num_sampled:
            decodes += num_tokens
            decode_keys += own
        else:
            prefills += 1
            tokens += num_tokens
            keys += own
    return StepLoad(decodes, decode_keys, prefills, tokens, keys)


# -------------------------------------------------------------------------------------------------------------- profile
# What steps do with their time while somebody wants to know, as events of Chrome's trace format, in microseconds of
# `time.monotonic()` (Google, "Trace Event Format").
#
# The parts of a step follow each other: `schedule`, until the executor has the plan; `execute`, until its result is
# there; `update`, until the next one is planned: bookkeeping, and telling the front end. Where a step is planned while
# another runs, `schedule` lies within the other's `execute`. An executor that `Profiles` tells what it does in there.


HOST, STEPS = 1, 2  # tracks


class StepProfiler:
    """Records steps when it is asked to. Owned by the EngineCore."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor if isinstance(executor, Profiles) else None
        self._events: list[dict[str, Any]] = []
        self._num_left = 0
        self._num_steps = 0
        self._ended: float | None = None  # the step before
        self._failure: Exception | None = None  # of the executor's part

    def start(self, num_steps: int) -> Profile:
        """Record the next steps. What was recorded before is dropped."""
        self._end_recording()
        self._events = [_name(HOST, "engine"), _name(STEPS, "steps")]
        self._num_steps, self._ended, self._failure = 0, None, None
        if self._executor is not None:
            self._executor.start_profile()
        self._num_left = num_steps
        return Profile()

    def note(self, step: StepSnapshot, planned_at: float, submitted_at: float, *, goes_on: bool) -> None:
        """A step has ended. `goes_on`: there was work from the end of the one before on."""
        if not self._num_left:
            return
        if self._ended is not None and goes_on and self._ended < planned_at:
            self._add("update", HOST, self._ended, planned_at)
        self._ended = step.time + step.seconds
        sizes = {
            "step": step.step,
            "requests": step.num_requests,
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.num_decode_tokens,
            "outcome": step.outcome.value,
        }
        self._add("schedule", HOST, planned_at, submitted_at)
        self._add("execute", STEPS, max(submitted_at, step.time), self._ended, sizes)
        self._num_steps += 1
        if self._num_left == 1:
            self._end_recording()
        else:
            self._num_left -= 1

    def stop(self) -> Profile:
        """What was recorded since the start, once."""
        self._end_recording()
        events, num_steps, failure = self._events, self._num_steps, self._failure
        self._events, self._num_steps, self._failure = [], 0, None
        if failure is not None and not isinstance(failure, ProfileTooLarge):
            raise failure
        encoded = msgspec.json.encode(events)
        if failure is not None or len(encoded) > MAX_PROFILE_BYTES:
            return Profile(num_steps=num_steps, is_too_large=True)
        return Profile(encoded, num_steps)

    def _end_recording(self) -> None:
        if not self._num_left:
            return
        self._num_left = 0
        if self._executor is not None:
            try:
                self._events += self._executor.stop_profile()
            except Exception as error:  # a look at the engine must not end it
                self._failure = error

    def _add(self, name: str, track: int, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
        self._events.append(event | {"args": args} if args else event)


def _name(track: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


# ---------------------------------------------------------------------------------------------------------- expert load
# How evenly tokens are spread over the experts of a model, from one telling to the next.


class ExpertLoad:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tokens: list[list[int]] = []  # when it was told before

    def tell(self, num_steps: int) -> list[tuple[int, float]] | None:
        """As `SchedulerStats` has it; None where it is not due, or no token went to an expert."""
        if num_steps % STEPS_BETWEEN_EXPERT_LOADS or not isinstance(self._executor, CountsExperts):
            return None
        before, self._tokens = self._tokens, self._executor.tokens_of_experts()
        before = before or [[0] * len(layer) for layer in self._tokens]
        layers = [
            [now - then for now, then in zip(*pair, strict=True)] for pair in zip(self._tokens, before, strict=True)
        ]
        return [(sum(layer), max(layer) * len(layer) / sum(layer)) for layer in layers if any(layer)] or None
