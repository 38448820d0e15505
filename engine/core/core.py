"""The engine's loop: plan, run, pick tokens, update the requests.

An EngineCore belongs to one thread. It knows nothing of event loops, channels or text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec

from engine import commands
from engine.config import Clock, EngineConfig
from engine.core.heartbeat import Heartbeat
from engine.core.participants import Device, ExpertLoad, Handler, Hooks, StepCosts, StepProfiler
from engine.costs.table import StepBudget, StepCostTable
from engine.errors import EngineDead, InvalidRequest, StepAbandoned
from engine.executor import AbortCheck, Executor, FailedStep, KeepsBlocks, StepHandle
from engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SamplingParams
from engine.plan import SchedulerOutput
from engine.scheduler.request import FINISH_REASONS, Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.steps import EndedStep
from engine.snapshot import EngineSnapshot, StepOutcome, StepSnapshot
from engine.structured.compiler import GrammarCompiler
from engine.structured.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

_STATUS_OF = {reason: status for status, reason in FINISH_REASONS.items()}

# Consecutive failures of steps with a single request after which the device counts as broken.
MAX_FAILURES_IN_A_ROW = 16

NUM_STEPS_KEPT = 128  # for snapshots
MOST_TENANTS = 64  # that a snapshot describes
EVERYTHING = commands.GetSnapshot()

IsAbandoned = Callable[[Sequence[str]], bool]


@dataclass(slots=True)
class StepInFlight:
    """A plan that was submitted to the executor."""

    plan: SchedulerOutput
    handle: StepHandle
    planned_at: float
    submitted_at: float
    prefill_budget: int


class EngineCore:
    """A scheduler and an executor, advanced one step at a time by the thread that owns them.

    Up to `config.pipeline_depth` steps are in flight at once, so that at depth 2 the device finds its next step waiting
    when one ends, instead of waiting for the host to pick tokens, update requests and plan.

    `heartbeat` has the time of the last progress and whether the engine is idle; `num_steps` counts ended steps, failed
    ones included. Any thread may read them; another process can read a heartbeat in shared memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        grammars: GrammarCompiler | None = None,
        *,
        costs: StepCostTable | None = None,
        learns_costs: bool = True,
        keep_costs: Callable[[StepCostTable], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Without `grammars`, requests for structured output fail. `costs` is the table of step costs that is known
        already; `learns_costs` and `keep_costs` are `learns` and `keep` of `StepCosts`."""
        self.config = config
        self.grammars = grammars
        self.executor = executor
        self.clock = clock  # the front end's clock, in which arrival times and deadlines are given
        self.costs = costs or StepCostTable.unknown(config.max_num_seqs, config.max_num_batched_tokens)
        pacing = StepBudget(self.costs, config.max_num_batched_tokens, config.target_inter_token_latency)
        tier = executor.tier if isinstance(executor, KeepsBlocks) else None
        self.scheduler = Scheduler(config, executor.num_blocks, executor.block_size, pacing, tier)
        self.num_steps = 0
        self.heartbeat = Heartbeat(clock=clock)
        self.heartbeat.wake()
        self.is_closed = False  # a `Close` command has arrived
        # Called with a step's new requests before the step.
        self.on_begin: Callable[[list[str]], None] = lambda request_ids: None
        self._quarantine = Quarantine()
        self._failures_in_a_row = 0
        self._broken_by: BaseException | None = None  # the exception of a step that was not contained
        self._num_waiting_reported = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end = 0.0  # when the latest step ended
        self._goes_on = False  # requests were still running when it ended
        self._past_steps: deque[StepSnapshot] = deque(maxlen=NUM_STEPS_KEPT)

        device = Device(executor)
        structured = None if grammars is None else StructuredOutputManager(grammars, self.scheduler.matchers_of)
        kv, profiler, experts = self.scheduler.kv, StepProfiler(executor), ExpertLoad(executor)
        step_costs = StepCosts(config, self.scheduler, executor, clock, learns=learns_costs, keep=keep_costs)
        self._hooks = Hooks(
            (device, structured, kv.tiers, profiler, experts, kv, kv.checkpoints, step_costs),
            closing=(step_costs, structured, kv.tiers, device),
        )
        self._handlers: dict[type, Handler] = {
            commands.AddRequests: self._add_all,
            commands.FinishRequests: self._finish_all,
            commands.ChargeTenants: lambda command: self.scheduler.shares.charge_elsewhere(command.served),
            commands.SetLogLevel: lambda command: logging.getLogger().setLevel(command.level.upper()),
            commands.Ask: self._answer,
            commands.Break: self._break,
            commands.Close: self._close,
            commands.GetSnapshot: self.snapshot,
            **self._hooks.handles,
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    # --- commands

    def carry_out(self, command: commands.Command) -> commands.Event | None:
        """Carry out a command of the front end between two steps. Returns its answer, or None."""
        event: commands.Event | None = self._handlers[type(command)](command)
        return event

    def _answer(self, ask: commands.Ask) -> commands.Answered:
        try:
            return commands.Answered(ask.number, self._handlers[type(ask.question)](ask.question))
        except Exception as error:  # a snapshot must not end the engine
            logger.exception("%s could not be answered", type(ask.question).__name__)
            return commands.Answered(ask.number, None, f"the engine could not answer ({type(error).__name__})")

    def _add_all(self, command: commands.AddRequests) -> None:
        for request in command.requests():
            if request.request_id in self.scheduler.requests:
                logger.error("request %s arrived twice; the second one is ignored", request.request_id)
            else:
                self.add(request)

    def _finish_all(self, command: commands.FinishRequests) -> None:
        for request_id in command.request_ids:
            self.finish_request(request_id, command.reason)

    def _break(self, command: commands.Break) -> None:
        raise command.error

    def _close(self, command: commands.Close) -> None:
        self.is_closed = True

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request, with a matcher if its tokens are restricted."""
        matchers = [on_add(request) for on_add in self._hooks.on_add]
        matcher = next((each for each in matchers if each is not None), None)
        self.scheduler.add(request, matcher)
        if matcher is None and request.sampling.restricts_tokens:
            self.scheduler.fail(request.request_id, "this engine cannot enforce what may be generated")

    def check_grammars(self, sampling: Iterable[SamplingParams]) -> None:
        """Raise InvalidRequest for a grammar that cannot be enforced. Blocks until all grammars are compiled."""
        for structured in {params.structured_output for params in sampling}:
            if structured is None:
                continue
            if self.grammars is None:
                raise InvalidRequest("This engine cannot enforce grammars.", param="structured_output")
            self.grammars.compile(structured)

    def finish_request(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside. Unknown and finished ids are a no-op."""
        self.scheduler.finish_request(request_id, _STATUS_OF[reason])

    def snapshot(self, asked: commands.GetSnapshot = EVERYTHING) -> EngineSnapshot:
        scheduler, now = self.scheduler, self.clock()
        running = islice(scheduler.running.values(), asked.most_requests)
        waiting = scheduler.waiting_for(asked.most_requests)
        state = EngineSnapshot(
            time=now,
            seconds=0.0,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            target_inter_token_latency=scheduler.config.target_inter_token_latency,
            num_steps=self.num_steps,
            num_steps_in_flight=len(self._in_flight),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            oldest_wait=None if (oldest := scheduler.waiting.oldest_arrival) is None else now - oldest,
            running=tuple(request.snapshot() for request in running),
            waiting=tuple(request.snapshot(waits_for) for request, waits_for in waiting),
            tenants=scheduler.shares.snapshot(MOST_TENANTS),
            blocks=scheduler.kv.snapshot(scheduler.running.values()),
            steps=tuple(step for step in self._past_steps if step.time + step.seconds > asked.after),
        )
        return msgspec.structs.replace(state, seconds=self.clock() - now)

    # --- steps

    def step(self, is_abandoned: IsAbandoned = lambda request_ids: False) -> EngineCoreOutputs:
        """Run one turn: schedule and submit until enough steps are in flight, then take the result of the oldest one
        and update.

        `is_abandoned` returns True if all of these requests are about to be ended; the step may then be aborted. A
        faulty request does not raise; EngineDead is raised when nothing can be computed any more. After any other
        exception the state of requests and blocks may be inconsistent, so every later call raises EngineDead.
        """
        if self._broken_by is not None:
            raise EngineDead("the engine has ended, because one of its steps failed; restart it") from self._broken_by
        try:
            self._plan_ahead(is_abandoned)
            step, outputs = self._end_oldest()
            for after_step in self._hooks.after_step:
                after_step(step)
            return self.report(outputs)
        except BaseException as error:
            self._broken_by = error
            raise

    def _plan_ahead(self, is_abandoned: IsAbandoned) -> None:
        """Make plans and submit them until `pipeline_depth` steps are in flight, at least one."""
        while len(self._in_flight) < self.config.pipeline_depth:
            if not self._in_flight:
                self._quarantine.clear(self.scheduler.requests)
            elif self._quarantine.suspects or isinstance(self._in_flight[-1].handle, FailedStep):
                return  # the next plan depends on the result of the step in flight
            planned_at = self.clock()
            for before_plan in self._hooks.before_plan:
                before_plan(planned_at, bool(self.scheduler.running))
            plan = self.scheduler.schedule(planned_at, self._quarantine.suspects)
            if self._in_flight and not plan.request_ids:
                self.scheduler.retract(plan)
                return
            submitted_at = self.clock()
            handle: StepHandle
            try:
                self._before_submit(plan)
                submitted_at = self.clock()
                handle = self.executor.submit(plan, AbortCheck(is_abandoned, plan.request_ids))
            except Exception as error:
                handle = FailedStep(error)
            budget = self.scheduler.pacing.latest
            self._in_flight.append(StepInFlight(plan, handle, planned_at, submitted_at, budget))

    def _before_submit(self, plan: SchedulerOutput) -> None:
        """Let participants add to the plan. If it is empty, they wait some milliseconds for grammars and KV loads."""
        for before_submit in self._hooks.before_submit:
            before_submit(plan)
        if not plan.request_ids:
            for wait in self._hooks.wait:
                wait()
        if plan.new_requests:
            self.on_begin([request.request_id for request in plan.new_requests])

    def _end_oldest(self) -> tuple[EndedStep, list[EngineCoreOutput]]:
        """Wait for the oldest step in flight, and update its requests."""
        in_flight = self._in_flight.popleft()
        plan = in_flight.plan
        try:
            output = in_flight.handle.result()
            if len(output.sampled_token_ids) != len(plan.request_ids):
                raise ValueError(
                    f"the executor ran {len(output.sampled_token_ids)} of {len(plan.request_ids)} requests"
                )
            step = self._ended(in_flight, StepOutcome.DONE)
            for before_update in self._hooks.before_update:
                before_update(step)
        except StepAbandoned:
            step = self._ended(in_flight, StepOutcome.ABANDONED)
            self.scheduler.give_up(step.ended)
            outputs = self.scheduler.take_ended()
        except EngineDead:  # the device, or the process of a rank, is gone
            raise
        except Exception as error:
            void = self._drain()
            step = self._ended(in_flight, StepOutcome.FAILED)
            outputs = self._contain([plan, *void], step.ended, error)
        else:
            if plan.request_ids:  # a plan without requests does not reach the device, so its success proves nothing
                self._failures_in_a_row = 0
            outputs = self.scheduler.update(plan, output, step.ended)
        self._log_failed(outputs)
        self._past_steps.append(step.snapshot(in_flight.prefill_budget, self.scheduler.take_left()))
        self.num_steps += 1
        self._last_end, self._goes_on = step.ended, bool(self.scheduler.running)
        self.heartbeat.beat()
        return step, outputs

    def _ended(self, in_flight: StepInFlight, outcome: StepOutcome) -> EndedStep:
        """Return the record of a step that ends now. A step that was planned ahead begins when its predecessor ends."""
        began, ended = max(in_flight.planned_at, self._last_end), self.clock()
        return EndedStep(
            plan=in_flight.plan,
            planned_at=in_flight.planned_at,
            submitted_at=in_flight.submitted_at,
            began=began,
            ended=ended,
            num_prefill_tokens=in_flight.plan.num_prefill_tokens,
            seconds_with_host=ended - (self._last_end if self._goes_on else began),
            outcome=outcome,
        )

    def _drain(self) -> list[SchedulerOutput]:
        """Drop the steps planned on top of a failed one. Returns their plans.

        The device must have finished them, because their blocks are about to be given to other requests.
        """
        plans = []
        while self._in_flight:
            void = self._in_flight.popleft()
            with suppress(Exception):
                void.handle.result()
            plans.append(void.plan)
        return plans

    def _contain(self, plans: Sequence[SchedulerOutput], now: float, error: Exception) -> list[EngineCoreOutput]:
        """Requeue the requests of a failed step (`plans[0]`) and of the steps planned on top of it. End the faulty
        request once it is known."""
        reach = self.scheduler.put_back(plans, now)
        logger.error("step %d failed with %d requests in it", plans[0].step, len(reach), exc_info=error)
        guilty = self._quarantine.split(reach) if reach else None
        if guilty is not None:
            self.scheduler.fail(guilty, f"the model step failed ({type(error).__name__})")
        if guilty is not None or not reach:
            self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{MAX_FAILURES_IN_A_ROW} steps in a row have failed; the device is broken") from error
        return self.scheduler.take_ended()

    @staticmethod
    def _log_failed(outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.error is None:
                continue
            if output.refusal is not None:
                logger.info("request %s was refused: %s", output.request_id, output.error)
            else:
                logger.error("request %s failed: %s", output.request_id, output.error)

    # --- between steps

    @property
    def has_news(self) -> bool:
        """Return True if the stats changed since they were last sent although no step ran: the last request was aborted
        while it waited for its grammar, blocks were stored, step costs were measured, or the prefix cache changed.
        """
        if len(self.scheduler.waiting) != self._num_waiting_reported:
            return True
        return any(has_news(self.num_steps) for has_news in self._hooks.has_news)

    def report(self, outputs: Sequence[EngineCoreOutput] = ()) -> EngineCoreOutputs:
        """Return the stats, together with a step's outputs if there are any."""
        stats = self.scheduler.take_stats()
        self._num_waiting_reported = stats.num_waiting
        events = EngineCoreOutputs(outputs=list(outputs), stats=stats, timestamp=self.heartbeat.last_progress)
        for report in self._hooks.report:
            report(events, self.num_steps)
        if events.kv_events is not None:
            self.heartbeat.count_kv_events(events.kv_events.sequence)
        return events

    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster, while there are no requests. Returns True if there is more
        of it.
        """
        has_more = False
        for when_idle in self._hooks.when_idle:
            has_more = when_idle(has_more)
        self.heartbeat.beat()
        return has_more

    def shutdown(self) -> None:
        """Release everything: the grammars' threads, the tiers and the device."""
        for close in self._hooks.close:
            close(self.is_closed)


class Quarantine:
    """The search for the requests that make a step fail, so that the others go on.

    When a step raises, its requests are put back and become suspects. While there are suspects, only a part of them
    runs at a time: half of those that failed together, then half of that half. A part that completes the work of the
    failed step is cleared; a suspect that fails alone is faulty. With k faulty among n requests, this takes about
    k * 2 * log2(n) steps. If an error occurs only in a large batch (memory), or only once, no request is found faulty
    and none ends.
    """

    def __init__(self) -> None:
        # Groups of suspects, of which the first runs alone: how many tokens each must have computed to be cleared.
        self._groups: deque[dict[str, int]] = deque()

    @property
    def suspects(self) -> set[str] | None:
        """The requests that may run in the next step; None if all may."""
        return set(self._groups[0]) if self._groups else None

    def split(self, failed: Mapping[str, int]) -> str | None:
        """Record that a step with these requests failed; the values are how many tokens it would have computed of each.

        Returns the faulty request, if this was the failure of a single suspect.
        """
        suspects = self._groups.popleft() if self._groups else {}
        unharmed = {request_id: mark for request_id, mark in suspects.items() if request_id not in failed}
        if unharmed:
            self._groups.appendleft(unharmed)
        ids = list(failed)
        if ids == list(suspects) and len(ids) == 1:
            return ids[0]
        middle = (len(ids) + 1) // 2
        for part in (ids[middle:], ids[:middle]):
            if part:
                self._groups.appendleft({request_id: failed[request_id] for request_id in part})
        return None

    def clear(self, living: Mapping[str, Request]) -> None:
        """Clear suspects that have computed enough tokens or have ended. Called before each step."""
        while self._groups:
            group = self._groups[0]
            for request_id in list(group):
                request = living.get(request_id)
                if request is None or request.num_computed_tokens >= group[request_id]:
                    del group[request_id]
            if group:
                return
            self._groups.popleft()
