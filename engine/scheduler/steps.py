"""The plan under construction, and plans in flight."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection

import msgspec

from engine.plan import NewRequestData, SchedulerOutput
from engine.scheduler.request import Request
from engine.snapshot import StepOutcome, StepSnapshot


class PlanDraft:
    """The remaining budget of a step that is planned at `now`, and the tokens given to each request. `only`, if set,
    lists the requests that the step is restricted to."""

    def __init__(
        self, budget: int, now: float = 0.0, only: Collection[str] | None = None, *, whole_prompts: bool = False
    ) -> None:
        self.budget = budget
        self.whole_prompts = whole_prompts  # a prompt that does not fit into the budget gets nothing of it
        self.now = now
        self.only = only
        self.num_tokens: dict[str, int] = {}  # computed
        # The steady requests, which come first in `num_tokens`; None where `update` has to handle one like any other.
        self.steady: dict[str, Request | None] = {}
        # Prefilling requests, and how many tokens each may sample: 1 with the last chunk. A decode may sample one at
        # every position that is computed.
        self.prefills: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.new_requests: list[NewRequestData] = []
        self.checkpoints: dict[str, list[tuple[int, int]]] = {}  # copies of states, as in the plan
        self.ran_out_of_blocks = False  # no waiting request should start
        # Returns how many prefill tokens, from the given position, fit into a step with these decodes. Called only for
        # the first prefill token, because most steps have none.
        self.pace: Callable[[int], int] | None = None

    def chunk(self, start: int, num_missing: int) -> int:
        """Return how many of `num_missing` tokens, from position `start` on, a request may get in this step."""
        self.set_pace(start)
        if self.whole_prompts and num_missing > self.budget:
            return 0
        return min(num_missing, self.budget)

    def set_pace(self, start: int) -> None:
        """Limit the budget once to the prefill tokens that fit into a step with these decodes."""
        pace, self.pace = self.pace, None
        if pace is not None:
            self.budget = min(self.budget, pace(start))

    def add_prefill(self, request: Request, num_tokens: int, num_missing: int) -> None:
        """Give `num_tokens` tokens to a request that lacks `num_missing`."""
        self.num_tokens[request.request_id] = num_tokens
        self.prefills[request.request_id] = int(num_tokens == num_missing)
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Take back a request's tokens, because it is preempted after all."""
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.steady.pop(request.request_id, None)
        self.prefills.pop(request.request_id, None)
        self.new_block_ids.pop(request.request_id, None)

    def unsteady(self, request_id: str) -> None:
        """Let `update` handle a steady request like any other after this step."""
        if request_id in self.steady:
            self.steady[request_id] = None

    def as_plan(self, step: int, removed_request_ids: list[str]) -> SchedulerOutput:
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
            checkpoints=self.checkpoints,
        )


# ------------------------------------------------------------------------------------------------------------ in flight
# Steps that were planned and are not accounted for yet. Owned by the Scheduler.
#
# With `pipeline_depth` 2 the next step is planned while the device still runs the one before it. A request's latest
# token is not known on the host then, but the device has it and feeds it back to itself. So the plan counts it as known
# (a placeholder), and only what depends on the token's value waits until the step is accounted for. This is safe:
#
# - `num_computed_tokens` counts only accounted steps; tokens in flight are added to it here.
# - A step that may sample several tokens of a request counts as if all of them came: there are blocks for the longest
#   outcome, and a request that could reach its limit is not planned until the outcome is known. If fewer come, the
#   device goes on where they end: a plan has numbers of tokens, not positions. Accounting adds what came, so the
#   request is one token behind again, and its surplus blocks wait in its table.
# - Blocks are published when they are accounted for, so the prefix cache never has a block that a failed step did not
#   compute, or one with unknown tokens.
# - A request can end while a step with it is in flight: the step's result for it is void. Its blocks are free at once,
#   although the step may still write to one of them: plans are executed in order, so the block's next owner writes
#   later. The late write goes behind everything that was accounted for, into a block that was not published.
# - On a device with stages (`num_stages`) as many plans are in flight; a request about to sample is in only one.
# - A preempted request loses what is in flight for it, and samples the same token again when it is resumed.


_NOTHING = PlanDraft(0)  # never written to


class StepsInFlight:
    """The tokens that each request was given in every step in flight, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[PlanDraft] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def latest(self) -> PlanDraft:
        """The step in flight while a plan is made; with pipeline stages, the sum of all steps in flight."""
        if len(self._steps) > 1:
            together = PlanDraft(0)
            for step in self._steps:
                for request_id, num_tokens in step.num_tokens.items():
                    together.num_tokens[request_id] = together.num_tokens.get(request_id, 0) + num_tokens
                together.prefills |= step.prefills
            return together
        return self._steps[0] if self._steps else _NOTHING

    def blocking(self) -> set[str]:
        """Return the requests that no further plan may contain yet, on a device with pipeline stages.

        They are about to sample, or in two plans already; the chunks of a prompt may follow each other through the
        stages.
        """
        busy: set[str] = set()
        seen: set[str] = set()
        for step in self._steps:
            busy.update(each for each in step.num_tokens if each in seen or step.prefills.get(each, 1))
            seen.update(step.num_tokens)
        return busy

    def begin(self, plan: PlanDraft) -> None:
        self._steps.append(plan)

    def end(self) -> PlanDraft:
        """Remove the oldest step. Returns its draft, without the requests that were voided."""
        return self._steps.popleft()

    def fail(self) -> PlanDraft:
        """Remove the oldest step, which has failed or was abandoned. Returns what `end` does."""
        return self.end()

    def retract(self) -> None:
        """Remove the latest step, which is not submitted."""
        self._steps.pop()

    def void(self, request_id: str) -> None:
        """Ignore the results of the steps in flight for this request, which ended or lost its row since they were
        planned.
        """
        for plan in self._steps:
            plan.num_tokens.pop(request_id, None)
            plan.prefills.pop(request_id, None)
            plan.unsteady(request_id)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in plan.num_tokens for plan in self._steps)


class SteadyRequests:
    """Running requests that get one token in every plan, and in most plans need nothing else.

    It is known many plans ahead when a steady request will need a block or reach its limit. In that plan it wakes: the
    scheduler plans it like any other request. In the plan before, it may fill a block, so `update` handles it like any
    other request. A request may also wake too early, after an abandoned step, which does no harm.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self._plan = 0  # number of the latest plan; retracted plans count
        self._wakes: defaultdict[int, list[Request]] = defaultdict(list)  # by number of the plan

    def begin(self, plan: PlanDraft) -> list[Request]:
        """Give each steady request one token in a new plan. Returns the requests that wake."""
        self._plan += 1
        plan.num_tokens, plan.steady = dict.fromkeys(self.requests, 1), {**self.requests}
        for request in self._wakes[self._plan + 1]:
            plan.unsteady(request.request_id)
        return [request for request in self._wakes.pop(self._plan, ()) if request.wakes_at == self._plan]

    def keep(self, plan: PlanDraft, request: Request, end: int) -> None:
        """Make a request steady, or keep one that woke. After this plan its first `end` tokens are computed."""
        self.requests[request.request_id] = request
        num_plans = min(request.room + 1, request.max_num_tokens - 1) - end
        request.wakes_at = self._plan + max(num_plans, 1)
        self._wakes[request.wakes_at].append(request)
        if num_plans <= 1:
            plan.unsteady(request.request_id)

    def postpone(self, plan: PlanDraft, request: Request) -> None:
        """Take a request out of the plan, because it waits for blocks or for its latest token. It wakes in the next."""
        plan.drop(request)
        request.wakes_at = self._plan + 1
        self._wakes[request.wakes_at].append(request)

    def leave(self, request: Request) -> None:
        request.wakes_at = 0
        self.requests.pop(request.request_id, None)
        if not self.requests:
            self._wakes.clear()  # without a next plan, it would keep requests that have ended

    def clear(self) -> None:
        """Make no request steady any more, because some may get no token in the next plan."""
        for request in list(self.requests.values()):
            self.leave(request)


class EndedStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step that has ended, as participants see it. Times are seconds of the engine's clock."""

    plan: SchedulerOutput
    planned_at: float
    submitted_at: float
    began: float  # a step that was planned ahead begins when its predecessor ends
    ended: float
    num_prefill_tokens: int
    seconds_with_host: float  # including host work since the previous step, if requests kept running
    outcome: StepOutcome

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def snapshot(self, prefill_budget: int, left: tuple[tuple[str, str], ...]) -> StepSnapshot:
        """Return the step as snapshots show it. The lists are the plan's own."""
        plan = self.plan
        return StepSnapshot(
            step=plan.step,
            time=self.began,
            seconds=self.seconds,
            outcome=self.outcome,
            num_requests=len(plan.request_ids),
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=plan.total_num_scheduled_tokens - self.num_prefill_tokens,
            prefill_budget=prefill_budget,
            request_ids=plan.request_ids,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_sampled_tokens=plan.num_sampled_tokens,
            left=left,
        )
