"""The simulated executor with a queue, as a device has one: a plan is taken at once and run later.

Nothing that was sampled is known before its result is asked for, unless the device happens to be fast; what was queued
behind a step that fails comes to nothing, in one of the ways in which that can happen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.errors import StepAbandoned
from engine.plan import ModelRunnerOutput, SchedulerOutput
from tests.engine.checked_executor import CheckedExecutor, PlanViolation


class QueueingExecutor(CheckedExecutor):
    """An `engine.executor.Executor` that runs at most two plans behind. `fast` is how likely a step is over when
    the next thing happens, 0 to 1; `most_in_flight` how many steps were on their way at once."""

    def __init__(self, *arguments: Any, fast: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fast = fast
        self.most_in_flight = 0
        self._random = random.Random(seed)
        self._queue: deque[QueuedStep] = deque()
        self._applies = False  # the diffs of the latest step that came to nothing
        self._in_flight: deque[QueuedStep] = deque()  # whose results nobody has asked for

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> QueuedStep:
        if self.is_shut_down:
            raise PlanViolation("a plan after the shutdown")
        self.plans.append(plan)
        # Removing what a failed step never introduced is right.
        self._introduced.update(new.request_id for new in plan.new_requests)
        step = QueuedStep(self, plan)
        step.is_void = any(earlier.has_failed for earlier in self._in_flight)
        for earlier in self._in_flight:
            if earlier.was_abandoned:
                step.outdated.update(earlier.plan.request_ids)
        self._queue.append(step)
        self._in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if self._random.random() < self.fast:
            self.run_until(step)
        return step

    def run_until(self, step: QueuedStep) -> None:
        while self._queue and step.outcome is None:
            self._run_next(self._queue.popleft())

    def retire(self, step: QueuedStep) -> None:
        if self._in_flight.popleft() is not step:
            raise PlanViolation("results are not asked for in order")
        if step.has_failed:
            for later in self._in_flight:
                later.is_void = True

    def _run_next(self, step: QueuedStep) -> None:
        if any(earlier.has_failed for earlier in self._in_flight if earlier is not step):
            step.is_void = True
        if step.is_void:
            step.outcome = self._run_void(step)
            return
        try:
            step.outcome = self._execute(step.plan, step.outdated)
        except Exception as error:
            step.outcome = error
        if step.was_abandoned:
            for later in self._queue:
                later.outdated.update(step.plan.request_ids)

    def _first_void(self) -> QueuedStep:
        return next(step for step in self._in_flight if step.is_void)

    def _run_void(self, step: QueuedStep) -> ModelRunnerOutput | Exception:
        # What follows on diffs that were not applied cannot be applied either.
        self._applies = (self._applies or step is self._first_void()) and self._random.random() < 0.5
        if self._applies:
            self._apply(step.plan)
        if self._random.random() < 0.5:
            return RuntimeError("the step before this one has failed")
        return ModelRunnerOutput(sampled_token_ids=[[3] for _ in step.plan.request_ids], logprobs={})


class QueuedStep:
    """The handle of a step in the queue."""

    def __init__(self, executor: QueueingExecutor, plan: SchedulerOutput) -> None:
        self.plan = plan
        self.outcome: ModelRunnerOutput | Exception | None = None
        self.is_void = False
        self.outdated: set[str] = set()  # requests that have not advanced as far as this step was planned on
        self._executor = executor

    @property
    def has_failed(self) -> bool:
        return isinstance(self.outcome, Exception) and not isinstance(self.outcome, StepAbandoned)

    @property
    def was_abandoned(self) -> bool:
        return isinstance(self.outcome, StepAbandoned)

    def result(self) -> ModelRunnerOutput:
        self._executor.run_until(self)
        self._executor.retire(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
