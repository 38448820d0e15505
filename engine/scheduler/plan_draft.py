"""A plan in the making. Used by the scheduler only, within one call of `schedule`."""

from __future__ import annotations

from engine.scheduler.plan import NewRequestData, SchedulerOutput
from engine.scheduler.request import Request


class PlanDraft:
    """The budget left and what has been given away."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.new_requests: list[NewRequestData] = []

    def add(self, request: Request, num_tokens: int) -> None:
        """Give a request these tokens."""
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Take back what a request was given, because it is preempted after all."""
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)

    def finished(self, step: int, removed_request_ids: list[str]) -> SchedulerOutput:
        """The plan."""
        num_tokens = list(self.num_tokens.values())
        return SchedulerOutput(
            step=step,
            removed_request_ids=removed_request_ids,
            new_requests=self.new_requests,
            new_block_ids=self.new_block_ids,
            request_ids=list(self.num_tokens),
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens),
        )
