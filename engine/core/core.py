"""The engine's loop: plan, run, pick tokens, update the requests.

An EngineCore belongs to one thread. It knows nothing of event loops, channels or text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from engine.commands import (
    AddRequests,
    Answer,
    Answered,
    Ask,
    Break,
    ChargeTenants,
    Close,
    Command,
    Event,
    FinishRequests,
    GetSnapshot,
    PublishKVEvents,
    ResetPrefixCache,
    SetLogLevel,
    StartProfile,
    StopProfile,
)
from engine.config import Clock, EngineConfig
from engine.core.failures import Quarantine
from engine.core.heartbeat import Heartbeat
from engine.core.participants import ExpertLoad, StepCosts, StepProfiler
from engine.costs.table import StepCostTable
from engine.errors import EngineDead, InvalidRequest, StepAbandoned
from engine.executor import Executor, FailedStep, KeepsBlocks, Prepares, StepHandle
from engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SamplingParams
from engine.plan import SchedulerOutput
from engine.scheduler.request import FINISH_REASONS
from engine.scheduler.scheduler import Scheduler
from engine.snapshot import EngineSnapshot, StepOutcome, StepSnapshot
from engine.structured.compiler import GrammarCompiler
from engine.structured.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

_STATUS_OF = {reason: status for status, reason in FINISH_REASONS.items()}

# Consecutive failures of steps with a single request after which the device counts as broken.
MAX_FAILURES_IN_A_ROW = 16

NUM_STEPS_KEPT = 128  # for snapshots
MOST_TENANTS = 64  # that a snapshot describes
EVERYTHING = GetSnapshot()

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
        """Without `grammars`, requests for structured output fail. `costs`, `learns_costs` and `keep_costs` are as
        `StepCosts` has them."""
        self.config = config
        self.grammars = grammars
        self.executor = executor
        tier = executor.tier if isinstance(executor, KeepsBlocks) else None
        self.scheduler = Scheduler(config, executor.num_blocks, executor.block_size, tier)
        self._tiers = self.scheduler.kv.tiers
        self.num_steps = 0
        self.heartbeat = Heartbeat(clock=clock)
        self.heartbeat.wake()
        self.clock = clock  # the front end's clock, in which arrival times and deadlines are given
        self._costs = StepCosts(config, self.scheduler, costs, learns=learns_costs, keep=keep_costs)
        self._costs.measure_on(executor, clock)
        self._quarantine = Quarantine()
        self._structured = StructuredOutputManager(grammars) if grammars is not None else None
        self._failures_in_a_row = 0
        self._num_waiting_told = 0
        self._expert_load = ExpertLoad(executor)
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end = 0.0  # when the latest step ended
        self._goes_on = False  # requests were still running when it ended
        self._past_steps: deque[StepSnapshot] = deque(maxlen=NUM_STEPS_KEPT)
        self._profiler = StepProfiler(executor)
        self.is_closed = False  # a `Close` command has arrived
        self._broken_by: BaseException | None = None  # the exception of a step that was not contained
        # Called with a step's new requests before the step.
        self.on_begin: Callable[[list[str]], None] = lambda request_ids: None

    @property
    def costs(self) -> StepCostTable:
        """The step costs, as far as they are known."""
        return self._costs.table

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def carry_out(self, command: Command) -> Event | None:
        """Carry out a command of the front end between two steps. Returns its answer, or None."""
        return _CARRY_OUT[type(command)](self, command)

    def _answer(self, ask: Ask) -> Answered:
        try:
            return Answered(ask.number, _ANSWERS[type(ask.question)](self, ask.question))
        except Exception as error:  # a snapshot must not end the engine
            logger.exception("%s could not be answered", type(ask.question).__name__)
            return Answered(ask.number, None, f"the engine could not answer ({type(error).__name__})")

    def _add_all(self, command: AddRequests) -> None:
        for request in command.requests():
            if request.request_id in self.scheduler.requests:
                logger.error("request %s has come twice and runs once", request.request_id)
            else:
                self.add(request)

    def _finish_all(self, command: FinishRequests) -> None:
        for request_id in command.request_ids:
            self.finish_request(request_id, command.reason)

    def _break(self, command: Break) -> None:
        raise command.error

    def _close(self, command: Close) -> None:
        self.is_closed = True

    def add(self, request: EngineCoreRequest) -> None:
        self._costs.end_measuring()
        restricted = request.sampling.restricts_tokens
        matcher = self._structured.start(request) if self._structured is not None and restricted else None
        self.scheduler.add(request, matcher)
        if restricted and matcher is None:
            self.scheduler.fail(request.request_id, "this engine cannot enforce what may be generated")

    def check_grammars(self, sampling: Iterable[SamplingParams]) -> None:
        """Raise InvalidRequest for a grammar that cannot be enforced. Blocks while it is compiled."""
        for structured in {params.structured_output for params in sampling}:
            if structured is None:
                continue
            if self.grammars is None:
                raise InvalidRequest("This engine cannot enforce grammars.", param="structured_output")
            self.grammars.compile(structured)

    def finish_request(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside. Unknown and finished ids are a no-op."""
        self.scheduler.finish_request(request_id, _STATUS_OF[reason])

    def snapshot(self, asked: GetSnapshot = EVERYTHING) -> EngineSnapshot:
        """Return a snapshot of the engine and its requests."""
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
            running=tuple(request.snapshot() for request in running),
            waiting=tuple(request.snapshot(waits_for) for request, waits_for in waiting),
            tenants=scheduler.shares.snapshot(MOST_TENANTS),
            blocks=scheduler.kv.snapshot(scheduler.running.values()),
            steps=tuple(step for step in self._past_steps if step.time + step.seconds > asked.after),
        )
        return msgspec.structs.replace(state, seconds=self.clock() - now)

    def step(self, is_abandoned: IsAbandoned = lambda request_ids: False) -> EngineCoreOutputs:
        """Run one turn: schedule and submit until enough steps are in flight, then take the result of the oldest one
        and update.

        `is_abandoned` returns True if all of these requests are about to be ended; the step may then be aborted. A
        faulty request does not raise; EngineDead is raised when nothing can be computed any more. After any other
        exception the accounts may be incomplete, so every later call raises EngineDead.
        """
        if self._broken_by is not None:
            raise EngineDead("the engine has ended, because one of its steps failed; restart it") from self._broken_by
        try:
            return self._step(is_abandoned)
        except BaseException as error:
            self._broken_by = error
            raise

    def _step(self, is_abandoned: IsAbandoned) -> EngineCoreOutputs:
        self._plan_ahead(is_abandoned)
        step = self._in_flight.popleft()
        plan = step.plan
        num_prefill_tokens = plan.num_prefill_tokens
        num_decode_tokens = plan.total_num_scheduled_tokens - num_prefill_tokens
        # A step that was planned ahead begins when the one before it ends.
        began, outcome = max(step.planned_at, self._last_end), StepOutcome.DONE
        try:
            output = step.handle.result()
            if len(output.sampled_token_ids) != len(plan.request_ids):
                raise ValueError(
                    f"the executor answered for {len(output.sampled_token_ids)} of {len(plan.request_ids)} requests"
                )
            ended = self.clock()
            # The host's work between two steps counts as part of their cost.
            lasted = ended - (self._last_end if self._goes_on else began)
            self._costs.observe(plan, num_prefill_tokens, lasted)
        except StepAbandoned:
            outcome, ended = StepOutcome.ABANDONED, self.clock()
            self._last_end = ended
            self.scheduler.give_up(ended)
            outputs = self.scheduler.take_ended()
        except EngineDead:  # the device, or the process of a rank, is gone
            raise
        except Exception as error:
            outcome = StepOutcome.FAILED
            outputs = self._contain(plan, error)
            ended = self._last_end
        else:
            if plan.request_ids:  # a plan without requests does not reach the device, so it shows nothing of its state
                self._failures_in_a_row = 0
            self._last_end = ended
            outputs = self.scheduler.update(plan, output, ended)
            self._name_failed(outputs)
            if self._tiers is not None:
                self._tiers.write_back(ended - began)
        self._past_steps.append(
            StepSnapshot(
                step=plan.step,
                time=began,
                seconds=ended - began,
                outcome=outcome,
                num_requests=len(plan.request_ids),
                num_prefill_tokens=num_prefill_tokens,
                num_decode_tokens=num_decode_tokens,
                prefill_budget=step.prefill_budget,
                request_ids=plan.request_ids,
                num_scheduled_tokens=plan.num_scheduled_tokens,
                num_sampled_tokens=plan.num_sampled_tokens,
                left=self.scheduler.take_left(),
            )
        )
        self._profiler.note(self._past_steps[-1], step.planned_at, step.submitted_at, goes_on=self._goes_on)
        self.num_steps += 1
        self._goes_on = bool(self.scheduler.running)
        self.heartbeat.beat()
        return self.tell(outputs)

    @property
    def has_news(self) -> bool:
        """Return True if the stats changed since they were last sent although no step ran: a request that waited
        alone for its grammar was aborted, blocks were stored, step costs were measured, or the prefix cache
        changed.
        """
        has_stored = self._tiers is not None and self._tiers.tier.has_news
        has_left = len(self.scheduler.waiting) != self._num_waiting_told
        return has_left or has_stored or self.scheduler.kv.has_events or self._costs.are_news(self.num_steps)

    def tell(self, outputs: Sequence[EngineCoreOutput] = ()) -> EngineCoreOutputs:
        """Return the stats, with the outputs of a step or without."""
        stats = self.scheduler.take_stats()
        self._num_waiting_told = stats.num_waiting
        if self._costs.are_news(self.num_steps):
            stats.step_costs = self._costs.tell(self.num_steps)
        stats.expert_load = self._expert_load.tell(self.num_steps)
        events, now = self.scheduler.kv.take_events(), self.heartbeat.last_progress
        if events is not None:
            self.heartbeat.count_kv_events(events.sequence)
        return EngineCoreOutputs(outputs=list(outputs), stats=stats, timestamp=now, kv_events=events)

    def prepare(self) -> bool:
        """Let the executor do a piece of work that makes later steps faster, while there are no requests. Returns
        True if there is more of it.
        """
        has_more = isinstance(self.executor, Prepares) and self.executor.prepare()
        if self._tiers is not None and self._tiers.is_storing:
            self._tiers.write_back(None)
            self._tiers.tier.wait()
            has_more = True
        if self._costs.is_measuring and not has_more:
            self._costs.measure()
            has_more = True  # its end is reported
        self.heartbeat.beat()
        return has_more

    def _plan_ahead(self, is_abandoned: IsAbandoned) -> None:
        """Make plans and submit them until `pipeline_depth` steps are in flight, at least one."""
        while len(self._in_flight) < self.config.pipeline_depth:
            if not self._in_flight:
                self._quarantine.clear(self.scheduler.requests)
            elif self._quarantine.suspects or isinstance(self._in_flight[-1].handle, FailedStep):
                return  # the next plan depends on the result of the step in flight
            planned_at = self.clock()
            plan = self.scheduler.schedule(
                planned_at,
                pace_prefill=self._costs.pace_prefill,
                seconds_per_prefill_token=self._costs.seconds_per_prefill_token,
                only=self._quarantine.suspects,
            )
            if self._in_flight and not plan.request_ids:
                self.scheduler.retract(plan)
                return
            submitted_at = self.clock()
            handle: StepHandle
            try:
                self._accompany(plan)
                submitted_at = self.clock()
                handle = self.executor.submit(plan, partial(is_abandoned, plan.request_ids))
            except Exception as error:
                handle = FailedStep(error)
            self._in_flight.append(StepInFlight(plan, handle, planned_at, submitted_at, self._costs.prefill_tokens))

    def _accompany(self, plan: SchedulerOutput) -> None:
        """Do the work that a plan needs besides its execution. If it has no request, wait for grammars and tiers."""
        if self._structured is not None:
            plan.masks = self._structured.masks(self.scheduler.matchers_of(plan))
            if not plan.request_ids:
                self._structured.wait_for_grammars()
        if self._tiers is not None and self._tiers.is_loading and not plan.request_ids:
            self._tiers.tier.wait()
        if plan.new_requests:
            self.on_begin([request.request_id for request in plan.new_requests])

    def _contain(self, plan: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        """Put the requests of a failed step back, and end the faulty one once it is known.

        Steps planned on top of the failed one are void and put back too. The device must have finished them first,
        because their blocks are about to be given to other requests.
        """
        plans = [plan]
        while self._in_flight:
            void = self._in_flight.popleft()
            with suppress(Exception):
                void.handle.result()
            plans.append(void.plan)
        now = self._last_end = self.clock()
        reach = self.scheduler.put_back(plans, now)
        logger.error("step %d failed with %d requests in it", plan.step, len(reach), exc_info=error)
        guilty = self._quarantine.split(reach) if reach else None
        if guilty is not None:
            self.scheduler.fail(guilty, f"the model step failed ({type(error).__name__})")
        if guilty is not None or not reach:
            self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{MAX_FAILURES_IN_A_ROW} steps in a row have failed; the device is broken") from error
        outputs = self.scheduler.take_ended()
        self._name_failed(outputs)
        return outputs

    @staticmethod
    def _name_failed(outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.error is None:
                continue
            if output.refusal is not None:
                logger.info("request %s was refused: %s", output.request_id, output.error)
            else:
                logger.error("request %s failed: %s", output.request_id, output.error)

    def shutdown(self) -> None:
        self._costs.keep()
        if self._structured is not None:
            self._structured.shutdown()
        if self._tiers is not None:
            if self.is_closed:  # and not broken
                self._tiers.store_rest(self.clock)
            self._tiers.tier.close()
        self.executor.shutdown()


_CARRY_OUT: dict[type, Callable[[EngineCore, Any], Event | None]] = {
    AddRequests: EngineCore._add_all,
    FinishRequests: EngineCore._finish_all,
    ChargeTenants: lambda core, command: core.scheduler.shares.charge_elsewhere(command.served),
    PublishKVEvents: lambda core, command: core.scheduler.kv.publish_events(command.key),
    ResetPrefixCache: lambda core, command: core.scheduler.kv.reset(),
    SetLogLevel: lambda core, command: logging.getLogger().setLevel(command.level.upper()),
    Ask: EngineCore._answer,
    Break: EngineCore._break,
    Close: EngineCore._close,
}
_ANSWERS: dict[type, Callable[[EngineCore, Any], Answer]] = {
    GetSnapshot: lambda core, question: core.snapshot(question),
    StartProfile: lambda core, question: core._profiler.start(question.num_steps),
    StopProfile: lambda core, question: core._profiler.stop(),
}
