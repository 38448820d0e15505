"""What a core does with the costs of its steps: it measures them while idle, learns from every step, paces prefill by
them, and says when the front end is to be told. Owned by the EngineCore."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.clock import Clock
from engine.core.calibration import Calibration
from engine.core.config import EngineConfig
from engine.core.executor import Executor
from engine.scheduler.cost_tracker import StepCostTracker
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_budget import StepBudget
from engine.scheduler.step_cost import StepCostTable

logger = logging.getLogger(__name__)

STEPS_BETWEEN_NEWS = 256  # after which the front end is told anew, in the beginning sooner
DECODES_PER_LOOK = 8  # steps of decodes alone of which one is looked at, after the beginning


class StepCosts:
    """The table, who keeps it up to date, and who asks it within the core.

    `table` is what is known already. It learns from the steps unless it is the very truth. Where somebody wants to
    `keep` it, which is called at the end at the latest, and nothing is known, costs are measured while there is no
    work.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: StepCostTable | None,
        *,
        learns: bool = True,
        keep: Callable[[StepCostTable], None] | None = None,
    ) -> None:
        self.table = table or StepCostTable.unknown(config.max_num_seqs, config.max_num_batched_tokens)
        self.seconds_per_prefill_token = self.table.seconds_per_prefill_token
        self._config = config
        self._tracker = StepCostTracker(self.table) if learns else None
        self._budget = StepBudget(self.table, config.max_num_batched_tokens, config.target_inter_token_latency)
        self._prefill_tokens = config.max_num_batched_tokens
        self._keep = keep
        self._calibration: Calibration | None = None
        self._num_steps = 0
        self._due = 1  # the step after which the front end is told
        if self.table.is_known:
            logger.info("Step costs, as they were: %s", self.table.summary)

    def measure_on(self, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        """Measure while there is no work, if that is wanted."""
        if self._keep is not None and self._tracker is not None and not self.table.is_known:
            self._calibration = Calibration(executor, self._config, scheduler.kv.pool, self._tracker, clock)

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
            self.keep()

    def observe(self, scheduler: Scheduler, seconds: float) -> None:
        """The step whose load the scheduler has just told took so long, with what the host did before it."""
        if self._tracker is None:
            return
        self._num_steps += 1
        load = scheduler.latest_load
        # A look takes a tenth of what a fast device's step does on the host. Steps of decodes alone come by thousands.
        if load.num_prefill_tokens or self._num_steps < STEPS_BETWEEN_NEWS or not self._num_steps % DECODES_PER_LOOK:
            self._tracker.observe(load, seconds)

    def pace_prefill(self, scheduler: Scheduler) -> int:
        """How many tokens of prefill the next step may carry beside decodes. Looked up only where there may be any,
        and with it what a token takes, for deadlines and for what is worth to be kept."""
        if scheduler.waiting or scheduler.latest_load.num_prefills:
            self.seconds_per_prefill_token = self.table.seconds_per_prefill_token
            if scheduler.kv.tiers is not None:
                scheduler.kv.tiers.seconds_per_token = self.table.seconds_per_prompt_token
            self._prefill_tokens = self._budget.prefill_tokens(scheduler.latest_load, scheduler.prefill_start)
        return self._prefill_tokens

    def are_news(self, num_steps: int) -> bool:
        """Whether the front end should be told, after so many steps."""
        return num_steps >= self._due and self.table.is_known

    def tell(self, num_steps: int) -> bytes:
        """The table for the front end."""
        self._due = num_steps + max(1, min(num_steps, STEPS_BETWEEN_NEWS))
        return self.table.to_json()

    def keep(self) -> None:
        if self._keep is not None and self.table.is_known:
            self._keep(self.table)
