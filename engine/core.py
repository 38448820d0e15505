"""The engine's heart: plan, run, pick, bookkeep, over and over.

An EngineCore belongs to one thread. It knows nothing of event loops, channels or text.
"""

from __future__ import annotations

import logging
import time

from engine.config import EngineConfig
from engine.executor import Executor
from engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.request import FINISH_REASONS, RequestStatus
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

_STATUS_OF = {reason: status for status, reason in FINISH_REASONS.items()}


class EngineCore:
    """Scheduler and executor, moved on one step at a time by whoever owns the thread.

    `num_steps` is the heartbeat: it grows with every step, whatever the step's fate, and is safe to read from any
    thread.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        self.scheduler = Scheduler(config, executor.num_blocks, executor.block_size)
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside. Unknown and finished ids are a no-op."""
        self.scheduler.finish(request_id, _STATUS_OF[reason])

    def step(self) -> EngineCoreOutputs:
        """One turn: schedule → execute → update. Never raises for the sake of the requests in it."""
        plan = self.scheduler.schedule(time.monotonic())
        try:
            output = self.executor.execute(plan).result()
        except Exception as error:
            outputs = self._fail(plan, error)
        else:
            outputs = self.scheduler.update(plan, output)
        self.num_steps += 1
        return EngineCoreOutputs(outputs=outputs, stats=self.scheduler.take_stats(), timestamp=time.monotonic())

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        """End the requests of a step that raised; everybody else goes on."""
        logger.error("step %d failed, ending its requests: %s", plan.step, ", ".join(plan.request_ids), exc_info=error)
        outputs = []
        for request_id in plan.request_ids:
            self.scheduler.finish(request_id, RequestStatus.FINISHED_ERROR)
            outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=f"the model step failed ({type(error).__name__})",
                )
            )
        return outputs

    def shutdown(self) -> None:
        self.executor.shutdown()
