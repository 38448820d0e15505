"""What has been planned and not yet accounted for.

With `pipeline_depth` 2 the next step is planned while the device still runs the one before it. Then a request's latest
token is not known here, but that does not matter: the device has it and feeds it back to itself. So the plan may count
it as there (a placeholder), and only what depends on the token's value waits until it is accounted for.

What is true of a step in flight, and why nothing is corrupted by planning on top of it:

- A request counts as computed (`num_computed_tokens`) what has been accounted for. What is in flight comes on top of it
  here.
- A step that may sample several tokens of a request is counted as if all of them came: blocks are there for the longest
  outcome, and a request that might be at its limit then is not planned until it is known. If fewer come, the device
  goes on where they end, because it knows; the plan on top of it says how many tokens are computed, not where. So
  nothing of that plan is wrong. When a step is accounted for, `num_computed_tokens` grows by what came and not by what
  was planned, which leaves whoever sampled one token behind. Blocks that were meant for more wait in its table.
- Blocks are published when they are accounted for, so nothing can be found that a failing step might never have
  computed, nor a block whose last tokens are not known yet.
- A request can end while a step that has it is in flight: the step computes one token for nobody, and what it says of
  that request is void. Its blocks are free at once, although that step may still write to one of them: whoever gets
  the block next is in a later plan, and plans are executed in order (on a device, one after the other on one stream),
  so the last to write is its new owner. The late write hits nothing that can be found in the prefix cache: it goes to
  a position behind everything that was accounted for the request, and so into a block that it had not published.
- Where a device has stages (`num_stages`), as many plans as those are on their way, each with other requests: whoever
  is about to sample is in no other plan.
- A request that is preempted loses what is in flight for it, and samples the same token again when it is resumed.

Owned by the Scheduler.
"""

from __future__ import annotations

from collections import deque

from engine.scheduler.plan_draft import PlanDraft

_NOTHING = PlanDraft(0)  # never written to


class StepsInFlight:
    """What was given to whom in each step under way, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[PlanDraft] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def latest(self) -> PlanDraft:
        """What is in flight while a plan is made: one step at most, or of a device with stages all of them together."""
        if len(self._steps) > 1:
            together = PlanDraft(0)
            for step in self._steps:
                for request_id, num_tokens in step.num_tokens.items():
                    together.num_tokens[request_id] = together.num_tokens.get(request_id, 0) + num_tokens
                together.prefills |= step.prefills
            return together
        return self._steps[0] if self._steps else _NOTHING

    def blocking(self) -> set[str]:
        """Of a device with stages: the requests that no further plan may have yet. They are about to sample, or in two
        plans already; the chunks of a prompt may follow each other through the stages."""
        busy: set[str] = set()
        seen: set[str] = set()
        for step in self._steps:
            busy.update(each for each in step.num_tokens if each in seen or step.prefills.get(each, 1))
            seen.update(step.num_tokens)
        return busy

    def begin(self, plan: PlanDraft) -> None:
        """A step has been planned."""
        self._steps.append(plan)

    def end(self) -> dict[str, int]:
        """The oldest step has ended. Returns what still counts of it: the tokens computed for each request."""
        return self._steps.popleft().num_tokens

    def retract(self) -> None:
        """The latest step is not made after all."""
        self._steps.pop()

    def void(self, request_id: str) -> None:
        """Whatever the steps in flight say of this request, it has lost its row or its life since."""
        for plan in self._steps:
            plan.num_tokens.pop(request_id, None)
            plan.prefills.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in plan.num_tokens for plan in self._steps)
