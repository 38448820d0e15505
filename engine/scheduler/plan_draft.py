"""A plan while it is being made, and what is remembered of it until it is accounted for. Used by the scheduler only."""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduler.plan import NewRequestData, SchedulerOutput
from engine.scheduler.request import Request


class PlanDraft:
    """The budget left and what has been given away."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens: dict[str, int] = {}  # computed
        # Who prefills, and how many tokens it may sample: 1 with the last chunk. Whoever decodes may sample one at
        # every position that is computed.
        self.prefills: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.new_requests: list[NewRequestData] = []
        self.ran_out_of_blocks = False  # so that nobody new should start
        # How many tokens of prompts fit beside those that decode, the first being at this position. Asked once there
        # is such a token, because most steps have none.
        self.pace: Callable[[int], int] | None = None

    def chunk(self, start: int, num_missing: int) -> int:
        """How many tokens a request may get that lacks so many from `start` on. It gets them by `add_prefill`."""
        self.set_pace(start)
        return min(num_missing, self.budget)

    def set_pace(self, start: int) -> None:
        """Limit the budget once to the prefill tokens that fit into a step with these decodes."""
        pace, self.pace = self.pace, None
        if pace is not None:
            self.budget = min(self.budget, pace(start))

    def add_prefill(self, request: Request, num_tokens: int, num_missing: int) -> None:
        """Give a request that lacks `num_missing` tokens so many of them."""
        self.num_tokens[request.request_id] = num_tokens
        self.prefills[request.request_id] = int(num_tokens == num_missing)
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Take back what a request was given, because it is preempted after all."""
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.prefills.pop(request.request_id, None)
        self.new_block_ids.pop(request.request_id, None)

    def as_plan(self, step: int, removed_request_ids: list[str]) -> SchedulerOutput:
        """The plan."""
        num_tokens = list(self.num_tokens.values())
        num_sampled = num_tokens
        if self.prefills:
            num_sampled = [self.prefills.get(request_id, number) for request_id, number in self.num_tokens.items()]
        return SchedulerOutput(
            step=step,
            removed_request_ids=removed_request_ids,
            new_requests=self.new_requests,
            new_block_ids=self.new_block_ids,
            request_ids=list(self.num_tokens),
            num_scheduled_tokens=num_tokens,
            num_sampled_tokens=num_sampled,
            total_num_scheduled_tokens=sum(num_tokens),
        )
