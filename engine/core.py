"""The engine's heart: plan, run, pick, bookkeep, over and over.

An EngineCore belongs to one thread. It knows nothing of event loops, channels or text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import EngineDead, StepAbandoned
from engine.executor import Executor
from engine.heartbeat import Heartbeat
from engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.quarantine import Quarantine
from engine.request import FINISH_REASONS
from engine.scheduler import Scheduler
from engine.step_budget import StepBudget

logger = logging.getLogger(__name__)

_STATUS_OF = {reason: status for status, reason in FINISH_REASONS.items()}

# Steps of a single request that fail one after the other before the device itself is taken for broken.
MAX_FAILURES_IN_A_ROW = 16

IsAbandoned = Callable[[Sequence[str]], bool]


class EngineCore:
    """Scheduler and executor, moved on one step at a time by whoever owns the thread.

    `heartbeat` tells when it last got on and whether it has nothing to do, `num_steps` how many steps have ended,
    whatever their fate. Safe to read from any thread; another process can read a heartbeat that was put in its place.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        self.scheduler = Scheduler(config, executor.num_blocks, executor.block_size)
        self.num_steps = 0
        self.heartbeat = Heartbeat()
        self.heartbeat.wake()
        self._budget = StepBudget(config.max_num_batched_tokens, config.target_inter_token_latency)
        self._quarantine = Quarantine()
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside. Unknown and finished ids are a no-op."""
        self.scheduler.finish(request_id, _STATUS_OF[reason])

    def step(self, is_abandoned: IsAbandoned = lambda request_ids: False) -> EngineCoreOutputs:
        """One turn: schedule → execute → update.

        `is_abandoned` tells whether all of these requests are about to be ended; then the step need not be finished.
        Never raises for the sake of the requests in it; raises EngineDead when nothing can be computed any more.
        """
        started = time.monotonic()
        self._quarantine.clear(self.scheduler.requests)
        plan = self.scheduler.schedule(
            started,
            max_prefill_tokens=self._budget.prefill_tokens(),
            seconds_per_prefill_token=self._budget.seconds_per_prefill_token,
            only=self._quarantine.suspects,
        )
        try:
            output = self.executor.submit(plan, lambda: is_abandoned(plan.request_ids)).result()
        except StepAbandoned:
            outputs = self.scheduler.take_ended()
        except Exception as error:
            outputs = self._contain(plan, error)
        else:
            now = time.monotonic()
            if plan.request_ids:  # a plan without requests does not reach a device, so it says nothing of one
                self._failures_in_a_row = 0
            self._budget.observe(plan.num_scheduled_tokens, now - started)
            outputs = self.scheduler.update(plan, output, now)
            self._name_failed(outputs)
        self.num_steps += 1
        self.heartbeat.beat()
        return EngineCoreOutputs(
            outputs=outputs, stats=self.scheduler.take_stats(), timestamp=self.heartbeat.last_progress
        )

    def _contain(self, plan: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        """A step has raised: put its requests back, and end the one at fault once it is known."""
        now = time.monotonic()
        reach = {
            request_id: self.scheduler.requests[request_id].num_computed_tokens + num_tokens
            for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)
        }
        logger.error("step %d failed with %d requests in it", plan.step, len(reach), exc_info=error)
        self.scheduler.put_back(plan, now)
        guilty = self._quarantine.split(reach) if reach else None
        if guilty is not None:
            self._failures_in_a_row += 1
            self.scheduler.fail(guilty, f"the model step failed ({type(error).__name__})")
        elif not reach:
            self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{MAX_FAILURES_IN_A_ROW} steps in a row have failed; the device is broken") from error
        outputs = self.scheduler.take_ended()
        self._name_failed(outputs)
        return outputs

    @staticmethod
    def _name_failed(outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                logger.error("request %s failed: %s", output.request_id, output.error)

    def shutdown(self) -> None:
        self.executor.shutdown()
