"""Checkpoints: copies of requests' states, from which later requests begin.

Some models have layers with a state for each request instead of keys and values (`ModelFacts.state_bytes`). The state
of a running request lies in its row at the runner, and every step overwrites it. So a prefix can be reused only up to
a place where a copy of the state was kept.

1. A copy has the name of the block that ends where it was taken, so it is found under the law of the prefix cache: the
   same tokens, tenant and salt.
2. Copies are taken at the last block boundary before the end of a prompt, at every `interval` tokens, where a prompt
   leaves the blocks that others have computed (the next prompt may leave them there, too), and at block boundaries of
   the answer. Of the last kind only the latest is kept, so an ended turn leaves one.
3. The plan of a step names the copies. They can be found only after the step has succeeded (`StepsWithCopies`).
4. There is memory for `num_slots` copies; the least recently used one is overwritten. A copy may be overwritten by the
   plan in which a request begins from it, because a runner begins requests before it computes.
5. A step that fails or is abandoned leaves the states of its requests undefined, so all of them are preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from engine.messages import CheckpointStats, EngineCoreOutputs
from engine.plan import NO_CHECKPOINT
from engine.scheduler.request import Request
from engine.scheduler.steps import PlanDraft, StepsInFlight


class Checkpoints:
    """The index of checkpoints. Owned by the KVCacheManager; a participant of the core."""

    def __init__(
        self,
        num_slots: int,
        state_bytes: int,
        block_size: int,
        interval: int,
        block_hash: Callable[[Request, int], bytes],
    ) -> None:
        """`interval` is rounded up to whole blocks. `block_hash` names a full block of a request."""
        self.num_slots = num_slots
        self._state_bytes = state_bytes
        self._num_hits = 0
        self._block_size = block_size
        self._interval = -(-interval // block_size) * block_size
        self._block_hash = block_hash
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by name, the least recently used first
        self._free = list(range(num_slots))
        self._planned: deque[dict[str, list[tuple[int, int]]]] = deque()  # of every step in flight, oldest first

    def report(self, events: EngineCoreOutputs, num_steps: int) -> None:
        """Add the number of checkpoints, their bytes and their hits to the stats."""
        count = len(self._slots)
        events.stats.checkpoints = CheckpointStats(count, count * self._state_bytes, self._num_hits)

    def covered(self, request: Request, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks, which are cached, lie before the last checkpoint."""
        request.branch = num_blocks * self._block_size
        return next((n for n in range(num_blocks, 0, -1) if self._block_hash(request, n - 1) in self._slots), 0)

    def begin(self, request: Request, num_blocks: int) -> int:
        """Return the checkpoint at the end of the request's first blocks, as `covered` counts them."""
        if num_blocks == 0:
            return NO_CHECKPOINT
        self._num_hits += 1
        name = self._block_hash(request, num_blocks - 1)
        self._slots.move_to_end(name)
        return self._slots[name]

    def plan(
        self, requests: Mapping[str, Request], num_tokens: Mapping[str, int], in_flight: Mapping[str, int]
    ) -> dict[str, list[tuple[int, int]]]:
        """Return the checkpoints to write in a step, by request id: pairs of a position and a slot. The step computes
        `num_tokens` of each request, after its tokens `in_flight`."""
        planned: dict[str, list[tuple[int, int]]] = {}
        for request_id, count in num_tokens.items() if self.num_slots else ():
            request = requests[request_id]
            start = request.num_computed_tokens + in_flight.get(request_id, 0)
            places = self._places(request, start, start + count)
            copies = [(place, slot) for place in places if (slot := self._slot_for(request, place)) is not None]
            if copies:
                planned[request_id] = copies
        self._planned.append(planned)
        return planned

    def _places(self, request: Request, start: int, end: int) -> Sequence[int]:
        """Return the positions after `start` and up to `end` at which the state is copied."""
        if end // self._block_size == start // self._block_size:
            return ()
        last = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        places = {*range((start // self._interval + 1) * self._interval, end + 1, self._interval)}
        places.update(place for place in (last, request.branch) if start < place <= end)
        if (latest := end // self._block_size * self._block_size) > last:
            places.add(latest)
        return sorted(places)

    def _slot_for(self, request: Request, place: int) -> int | None:
        """Return the slot for a copy; None if there is one already, or every slot is planned for another copy."""
        is_known = place <= request.num_tokens  # its latest token may be in flight
        if is_known and (name := self._block_hash(request, place // self._block_size - 1)) in self._slots:
            self._slots.move_to_end(name)
            return None
        if request.latest_checkpoint is not None and place > request.num_prompt_tokens:
            self._drop(request.latest_checkpoint)
            request.latest_checkpoint = None
        if not self._free:
            if not self._slots:
                return None
            self._free.append(self._slots.popitem(last=False)[1])
        return self._free.pop()

    def keep(self, requests: Mapping[str, Request], valid: Mapping[str, int]) -> None:
        """Publish the copies of the oldest step in flight, which has succeeded, for requests that it counts for."""
        for request_id, copies in self._planned.popleft().items():
            request = requests.get(request_id) if request_id in valid else None
            for place, slot in copies:
                name = None if request is None else self._block_hash(request, place // self._block_size - 1)
                if name is None or name in self._slots:
                    self._free.append(slot)
                    continue
                self._slots[name] = slot
                if request is not None and place > request.num_prompt_tokens and place % self._interval:
                    request.latest_checkpoint = name

    def void(self) -> None:
        """Drop the copies of the oldest step in flight."""
        self._free += (slot for copies in self._planned.popleft().values() for _, slot in copies)

    def retract(self) -> None:
        """Forget the latest plan, which has no requests."""
        self._planned.pop()

    def withdraw(self, request: Request) -> None:
        for index in range(request.num_tokens // self._block_size):
            self._drop(self._block_hash(request, index))

    def reset(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()

    def _drop(self, name: bytes) -> None:
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free, found under one name, or planned for one copy."""
        planned = [slot for step in self._planned for copies in step.values() for _, slot in copies]
        if sorted([*self._free, *self._slots.values(), *planned]) != list(range(self.num_slots)):
            raise AssertionError("every slot must be exactly one of free, kept and planned")


class StepsWithCopies(StepsInFlight):
    """Steps in flight that make copies. The copies of a step are published when it ends, for its valid requests."""

    def __init__(self, checkpoints: Checkpoints, requests: Mapping[str, Request]) -> None:
        super().__init__()
        self._checkpoints, self._requests = checkpoints, requests

    def begin(self, plan: PlanDraft) -> None:
        plan.checkpoints = self._checkpoints.plan(self._requests, plan.num_tokens, self.latest.num_tokens)
        super().begin(plan)

    def end(self) -> PlanDraft:
        draft = super().end()
        self._checkpoints.keep(self._requests, draft.num_tokens)
        return draft

    def fail(self) -> PlanDraft:
        self._checkpoints.void()
        return super().end()

    def retract(self) -> None:
        self._checkpoints.retract()
        super().retract()
