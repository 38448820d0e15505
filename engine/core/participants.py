"""Participants, which are objects with hooks that the core calls around each step; and the core's own ones.

1. A capability is an entry in the core's list of participants, not a branch in its loop.
2. A hook that raises ends the engine, except `before_submit`, `wait` and `before_update`: then the step counts as
   failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from engine.commands import Profile, StartProfile, StopProfile
from engine.config import Clock, EngineConfig
from engine.costs.measuring import Calibration, LostTime, StepCostTracker
from engine.costs.table import StepCostTable, StepLoad, chunk_keys
from engine.errors import ProfileTooLarge
from engine.executor import MAX_PROFILE_BYTES, STEPS_BETWEEN_EXPERT_LOADS, CountsExperts, Executor, Prepares, Profiles
from engine.messages import EngineCoreOutputs, EngineCoreRequest
from engine.plan import SchedulerOutput
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.steps import EndedStep
from engine.structured.matchers import TokenMatcher

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Any]
"""Carries out a command, or answers a question."""


class Hooks:
    """The bound methods of the participants by hook, in calling order.

    A participant is any object with some of these methods. They are called on the engine's thread.
    """

    def __init__(self, participants: Iterable[object | None], *, closing: Iterable[object | None]) -> None:
        """`closing` lists the participants in the order in which they are closed."""
        participants = tuple(participants)

        def having(name: str, those: Iterable[object | None] = participants) -> tuple[Any, ...]:
            return tuple(getattr(each, name) for each in those if hasattr(each, name))

        # The commands and questions that participants handle, by type.
        self.handles: dict[type, Handler] = {}
        for handles in having("handles"):
            self.handles |= handles
        # Called with a request that has arrived. Returns the matcher that restricts its tokens, or None.
        self.on_add: tuple[Callable[[EngineCoreRequest], TokenMatcher | None], ...] = having("on_add")
        # Called with the time, and whether requests are running.
        self.before_plan: tuple[Callable[[float, bool], None], ...] = having("before_plan")
        # Not called with a plan that is retracted.
        self.before_submit: tuple[Callable[[SchedulerOutput], None], ...] = having("before_submit")
        # Called if no request can run although there is work. Waits for 5 ms at most.
        self.wait: tuple[Callable[[], None], ...] = having("wait")
        # Called with a step that is DONE, before its requests are updated.
        self.before_update: tuple[Callable[[EndedStep], None], ...] = having("before_update")
        # Called with every step.
        self.after_step: tuple[Callable[[EndedStep], None], ...] = having("after_step")
        # Does at most 0.1 s of work while there are no requests. The argument is True if an earlier participant has
        # more work to do; the hook returns True if any participant up to itself has.
        self.when_idle: tuple[Callable[[bool], bool], ...] = having("when_idle")
        # Called with the number of ended steps. Returns True if there is something to report although no step ran.
        self.has_news: tuple[Callable[[int], bool], ...] = having("has_news")
        # Called with what is sent to the front end, to complete it, and the number of ended steps.
        self.report: tuple[Callable[[EngineCoreOutputs, int], None], ...] = having("report")
        # Called at the end with whether the engine is healthy.
        self.close: tuple[Callable[[bool], None], ...] = having("close", closing)


class Device:
    """The executor's work between steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def when_idle(self, has_more: bool) -> bool:
        return (isinstance(self._executor, Prepares) and self._executor.prepare()) or has_more

    def close(self, is_healthy: bool) -> None:
        self._executor.shutdown()


# ----------------------------------------------------------------------------------------------------------- step costs

STEPS_BETWEEN_NEWS = 256  # between two reports of the table to the front end; fewer at the start
FIRST_LOOKS = 32  # how many steps at the start are all observed
DECODES_PER_LOOK = 8  # afterwards one of so many decode-only steps is observed
STEPS_BETWEEN_CHANGES = 16  # steps after which a table that has changed much is sent to the front end again
MUCH = 0.2  # so large a sum of changes is much; natural logarithms of factors


class StepCosts:
    """Keeps the scheduler's table of step costs up to date, sends it to the front end, and saves it."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        learns: bool,
        keep: Callable[[StepCostTable], None] | None,
    ) -> None:
        """`learns` lets real steps update the table. `keep` saves the table when it has been measured and at the end.
        If `keep` is given and few costs are known, they are measured while there is no work."""
        self.table = scheduler.pacing.table
        self._requests = scheduler.requests
        self._lost_time = LostTime(executor)
        self._tracker = StepCostTracker(self.table) if learns else None
        self._keep = keep
        self._calibration: Calibration | None = None
        if keep is not None and self._tracker is not None and not self.table.is_complete:
            pool = scheduler.kv.pool
            self._calibration = Calibration(executor, config, pool, self._tracker, self._lost_time, clock)
        self._num_observable = 0
        self._due = 1  # the number of ended steps at which the table is sent to the front end
        self._sent_at = 0
        self._changes_sent = 0.0
        if self.table.is_known:
            logger.info("Using step costs measured earlier: %s", self.table.summary)

    def on_add(self, request: EngineCoreRequest) -> None:
        self._end_measuring()

    def when_idle(self, has_more: bool) -> bool:
        """Measure one made-up step. Returns True even after the last one, so that the core reports the new table."""
        if has_more or self._calibration is None:
            return has_more
        try:
            if not self._calibration.step():
                self._end_measuring()
        except Exception:  # real steps fill the table, too
            logger.warning("step costs could not be measured; they will be learned from real steps", exc_info=True)
            self._end_measuring()
        return True

    def _end_measuring(self) -> None:
        calibration, self._calibration = self._calibration, None
        if calibration is not None and self.table.is_known:
            logger.info("Step costs, measured in %.1f s: %s", calibration.seconds, self.table.summary)
            self.table.measured_at, self.table.machine_load = time.time(), os.getloadavg()[0]
            self._due = 0
            self._save()

    def before_update(self, step: EndedStep) -> None:
        """Learn from a step. Observing costs a tenth of a fast device's host time per step, so only some of the many
        decode-only steps are observed. A step that other work delayed counts in the spread only."""
        if self._tracker is None:
            return
        self._num_observable += 1
        seconds = step.seconds_with_host
        was_held_up = self._lost_time.was_held_up(seconds)
        is_due = self._num_observable <= FIRST_LOOKS or not self._num_observable % DECODES_PER_LOOK
        if step.num_prefill_tokens or is_due:
            load = _load(step.plan, self._requests)
            if not was_held_up:
                self._tracker.observe(load, seconds)
            self.table.note(load, seconds)
            self.table.measured_at = time.time()

    def has_news(self, num_steps: int) -> bool:
        """Return True if the table is due to be sent: after some steps, or fewer if it has changed much. The front end
        uses it to refuse requests."""
        due = self._due
        if self._tracker is not None and self._tracker.changes - self._changes_sent > MUCH:
            due = min(due, self._sent_at + STEPS_BETWEEN_CHANGES)
        return num_steps >= due and self.table.is_known

    def report(self, events: EngineCoreOutputs, num_steps: int) -> None:
        if self.has_news(num_steps):
            self._due = num_steps + max(1, min(num_steps, STEPS_BETWEEN_NEWS))
            self._sent_at, self._changes_sent = num_steps, 0.0 if self._tracker is None else self._tracker.changes
            if self._num_observable:
                self.table.machine_load = os.getloadavg()[0]
            events.stats.step_costs = self.table.to_json()

    def close(self, is_healthy: bool) -> None:
        self._save()

    def _save(self) -> None:
        if self._keep is not None and self.table.is_known:
            self._keep(self.table.settled())


def _load(plan: SchedulerOutput, requests: Mapping[str, Request]) -> StepLoad:
    """Return what a step computed. The progress of requests that have ended since it was planned counts as 0."""
    if not plan.num_prefill_tokens and plan.total_num_scheduled_tokens == (num_tokens := len(plan.request_ids)):
        living = (request for request in map(requests.get, plan.request_ids) if request is not None)
        return StepLoad(num_tokens, num_tokens + sum(request.num_computed_tokens for request in living))
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
# Records what steps spend their time on, as events of Chrome's trace format, in microseconds of `time.monotonic()`
# (Google, "Trace Event Format").
#
# The parts of a step follow each other: `schedule` until the executor has the plan, `execute` until its result is
# there, `update` until the next step is planned. `update` includes sending the outputs to the front end. If a step is
# planned while another runs, its `schedule` lies within the other's `execute`. An executor with the interface
# `Profiles` adds events for its own parts.


HOST, STEPS = 1, 2  # tracks


class StepProfiler:
    """Records steps between a `StartProfile` and a `StopProfile`."""

    def __init__(self, executor: Executor) -> None:
        self.handles: dict[type, Handler] = {
            StartProfile: lambda question: self._start(question.num_steps),
            StopProfile: lambda question: self._stop(),
        }
        self._executor = executor if isinstance(executor, Profiles) else None
        self._events: list[dict[str, Any]] = []
        self._num_left = 0
        self._num_steps = 0
        self._ended: float | None = None  # the end of the previous step
        self._failure: Exception | None = None  # of the executor's part

    def _start(self, num_steps: int) -> Profile:
        """Record the next steps. What was recorded before is dropped."""
        self._end_recording()
        self._events = [_name(HOST, "engine"), _name(STEPS, "steps")]
        self._num_steps, self._ended, self._failure = 0, None, None
        if self._executor is not None:
            self._executor.start_profile()
        self._num_left = num_steps
        return Profile()

    def after_step(self, step: EndedStep) -> None:
        if not self._num_left:
            return
        if self._ended is not None and step.seconds_with_host > step.seconds:
            self._add("update", HOST, self._ended, step.planned_at)
        self._ended = step.ended
        sizes = {
            "step": step.plan.step,
            "requests": len(step.plan.request_ids),
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.plan.total_num_scheduled_tokens - step.num_prefill_tokens,
            "outcome": step.outcome.value,
        }
        self._add("schedule", HOST, step.planned_at, step.submitted_at)
        self._add("execute", STEPS, max(step.submitted_at, step.began), step.ended, sizes)
        self._num_steps += 1
        if self._num_left == 1:
            self._end_recording()
        else:
            self._num_left -= 1

    def _stop(self) -> Profile:
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
            except Exception as error:  # a profile must not end the engine
                self._failure = error

    def _add(self, name: str, track: int, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
        self._events.append(event | {"args": args} if args else event)


def _name(track: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


# ---------------------------------------------------------------------------------------------------------- expert load


class ExpertLoad:
    """Reports how evenly the tokens since the previous report were spread over a model's experts."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tokens: list[list[int]] = []  # at the latest report

    def report(self, events: EngineCoreOutputs, num_steps: int) -> None:
        if num_steps % STEPS_BETWEEN_EXPERT_LOADS or not isinstance(self._executor, CountsExperts):
            return
        before, self._tokens = self._tokens, self._executor.tokens_of_experts()
        before = before or [[0] * len(layer) for layer in self._tokens]
        layers = [
            [now - then for now, then in zip(*pair, strict=True)] for pair in zip(self._tokens, before, strict=True)
        ]
        load = [(sum(layer), max(layer) * len(layer) / sum(layer)) for layer in layers if any(layer)]
        events.stats.expert_load = load or None
