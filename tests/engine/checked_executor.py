"""The simulated executor with memory, and with checks of every plan: for all tests that are about the engine.

Its KV memory is real in the one way that matters here: each slot remembers the digest of the sequence up to the token
that stood there. Every step reads all earlier positions of its requests through their block tables, and a slot that
does not hold exactly what this sequence needs there is a `PlanViolation`: a block lost, shared wrongly, reused too
early or never written is caught in the very step that would have computed with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from engine.executor import BlockTier, StepHandle
from engine.plan import NO_CHECKPOINT, KVWindows, ModelRunnerOutput, NewRequestData, SchedulerOutput
from tests.engine.simulated_executor import Row, SimulatedExecutor

_BEGIN = -2  # a state before any token
_REJECTED = -1  # what stands where a draft was not taken; no digest


class PlanViolation(BaseException):
    """The scheduler gave a plan that would corrupt memory.

    Not an Exception: the engine survives those by ending requests, and this must end the test.
    """


class CheckedExecutor(SimulatedExecutor):
    """Simulated KV memory, and limits to hold the plans to.

    `before_step` is called with each plan after its diffs have been applied and before anything is computed; it may
    wait (a slow device) or raise (a broken one). What is computed for tokens that `how_many` does not give is written
    and worth nothing. `plans` keeps every plan, `computed` counts how many tokens of each request were computed, with
    repetitions.
    """

    tier: BlockTier | None = None  # tests set one

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        windows: KVWindows = (None,),
        num_checkpoints: int | None = None,
        step_seconds: float = 0.0,
        before_step: Callable[[SchedulerOutput], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, vocab_size, **options)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_windows = windows
        self.step_seconds = step_seconds
        self.before_step = before_step
        self.plans: list[SchedulerOutput] = []
        self.computed: Counter[str] = Counter()
        self.is_shut_down = False
        self._memory: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)  # digest and group
        self._introduced: set[str] = set()
        # With checkpoints each row has a state, which is worth the digest of the tokens it has seen, or nothing.
        self._states: dict[str, int | None] | None = None if num_checkpoints is None else {}
        self._checkpoints: list[int | None] = [None] * (num_checkpoints or 0)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        if self.is_shut_down:
            raise PlanViolation("a plan after the shutdown")
        self.plans.append(plan)
        return super().submit(plan, abandoned)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _execute(self, plan: SchedulerOutput, outdated: Collection[str] = ()) -> ModelRunnerOutput:
        """Run a plan. What it says of the `outdated` is wrong, and what is computed for them is for nobody."""
        self._apply(plan)
        self._check(plan, outdated)
        if self._states is not None:
            return self._run_with_states(plan, self._states, outdated)
        self._pause(plan)
        return self._run(plan)

    def _pause(self, plan: SchedulerOutput) -> None:
        if self.before_step is not None:
            self.before_step(plan)
        if self.step_seconds:
            time.sleep(self.step_seconds)

    def _run_with_states(
        self, plan: SchedulerOutput, states: dict[str, int | None], outdated: Collection[str]
    ) -> ModelRunnerOutput:
        """A step that fails leaves nothing of the states that it was about to change, and the `outdated` have none."""
        for new in plan.new_requests:
            if new.num_computed_tokens == 0:
                _require(new.checkpoint == NO_CHECKPOINT, f"{new.request_id} begins with the state of another")
                states[new.request_id] = _BEGIN
            else:
                _require(new.checkpoint != NO_CHECKPOINT, f"{new.request_id} begins within its tokens without a state")
                states[new.request_id] = self._checkpoints[new.checkpoint]
        starts = {request_id: self._rows[request_id].num_computed_tokens for request_id in plan.request_ids}
        for request_id, start in starts.items():
            right = self._rows[request_id].digests[start - 1] if start else _BEGIN
            is_right = states[request_id] == right or request_id in outdated
            _require(is_right, f"{request_id} goes on from a wrong state at {start}")
        copies = plan.checkpoints
        slots = [slot for each in copies.values() for _, slot in each]
        _require(len(set(slots)) == len(slots), "two copies of states go to one checkpoint")
        _require(set(copies) <= set(starts), "a state is copied of a request that does not run")
        states |= dict.fromkeys(starts)
        for slot in slots:
            self._checkpoints[slot] = None
        self._pause(plan)
        output = self._run(plan)
        for request_id, start in starts.items():
            if request_id in outdated:
                continue
            row = self._rows[request_id]
            states[request_id] = row.digests[row.num_computed_tokens - 1]
            for place, slot in copies.get(request_id, ()):
                _require(start < place <= row.num_computed_tokens, f"{request_id} has no state at {place} in this step")
                self._checkpoints[slot] = row.digests[place - 1]
        return output

    # --- diffs

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed_request_ids:
            _require(request_id in self._introduced, f"{request_id} is removed but was never introduced")
        for new in plan.new_requests:
            is_known = new.request_id in self._rows and new.request_id not in plan.removed_request_ids
            self._check_new_request(new, is_known=is_known)
        new_ids = {new.request_id for new in plan.new_requests}
        for request_id, block_ids in plan.new_block_ids.items():
            is_known = request_id in self._rows and request_id not in plan.removed_request_ids
            _require(is_known, f"blocks for {request_id}, which is unknown")
            _require(request_id not in new_ids, f"blocks for {request_id} twice in one plan")
            _require(bool(block_ids), f"an empty list of new blocks for {request_id}")
        super()._apply(plan)

    def _check_new_request(self, new: NewRequestData, *, is_known: bool) -> None:
        _require(not is_known, f"{new.request_id} is introduced twice")
        _require(0 <= new.num_computed_tokens < len(new.token_ids), f"{new.request_id} has nothing to compute")
        _require(0 < new.num_prompt_tokens <= len(new.token_ids), f"{new.request_id} has more prompt than tokens")
        self._introduced.add(new.request_id)

    # --- hygiene

    def _check(self, plan: SchedulerOutput, outdated: Collection[str]) -> None:
        _require(len(plan.request_ids) == len(set(plan.request_ids)), "a request is scheduled twice in one step")
        total = sum(plan.num_scheduled_tokens)
        _require(total == plan.total_num_scheduled_tokens, f"{total} tokens, not {plan.total_num_scheduled_tokens}")
        if self.max_num_batched_tokens is not None:
            _require(total <= self.max_num_batched_tokens, f"{total} tokens exceed {self.max_num_batched_tokens}")
        if self.max_num_seqs is not None:
            _require(len(self._rows) <= self.max_num_seqs, f"{len(self._rows)} rows exceed {self.max_num_seqs}")
        for new in plan.new_requests:
            _require(new.request_id in plan.request_ids, f"{new.request_id} is introduced but not scheduled")
        for request_id in plan.new_block_ids:
            _require(request_id in plan.request_ids, f"{request_id} gets blocks but is not scheduled")
        scheduled = zip(plan.request_ids, plan.num_scheduled_tokens, plan.num_sampled_tokens, strict=True)
        for request_id, num_tokens, num_sampled in scheduled:
            _require(request_id in self._rows, f"{request_id} is scheduled but unknown")
            row = self._rows[request_id]
            end = row.num_computed_tokens + num_tokens
            _require(num_tokens > 0, f"{request_id} is scheduled for {num_tokens} tokens")
            # From the last known token on, a token may be sampled at every position.
            may_sample = max(0, end - row.num_tokens + 1)
            if request_id not in outdated:
                _require(num_sampled == may_sample, f"{request_id} is to sample {num_sampled} tokens: {may_sample} can")
            if num_sampled > 1 and row.sampling.max_tokens is not None:
                most = row.num_prompt_tokens + row.sampling.max_tokens
                _require(row.num_tokens + num_sampled <= most, f"{request_id} is to sample beyond max_tokens")
            places, left = divmod(len(row.block_ids), len(self.kv_windows))
            _require(left == 0, f"the block table of {request_id} is not whole")
            _require(end <= places * self.block_size, f"the block table of {request_id} is too short")
            used = self._used_blocks(row)
            _require(len(set(used)) == len(used), f"{request_id} holds a block twice")
            _require(all(0 <= i < self.num_blocks for i in used), f"{request_id} has a block out of range")

    # --- memory

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        rows = {request_id: self._rows[request_id] for request_id in plan.request_ids}
        before = [(row.num_computed_tokens, row.num_tokens) for row in rows.values()]
        # What a request builds on was there before the step, and nobody overwrites it during the step.
        for (request_id, row), (start, _) in zip(rows.items(), before, strict=True):
            self._read(request_id, row, start, start)
        output = super()._run(plan)
        written: dict[int, tuple[int, int]] = {}
        for (request_id, row), (start, num_known), num_tokens in zip(
            rows.items(), before, plan.num_scheduled_tokens, strict=True
        ):
            for position in range(start, start + num_tokens):
                right = position < max(row.num_computed_tokens, num_known)
                for group in range(len(self.kv_windows)):
                    slot = self._slot_of(row, group, position)
                    value = (row.digests[position] if right else _REJECTED, group)
                    _require(written.setdefault(slot, value) == value, f"{request_id} writes where another one does")
                    self._memory[slot] = value
            self.computed[request_id] += num_tokens
        for (request_id, row), (start, _) in zip(rows.items(), before, strict=True):
            self._read(request_id, row, start, row.num_computed_tokens)
        return output

    def _read(self, request_id: str, row: Row, start: int, end: int) -> None:
        """All that tokens from `start` on see of the tokens before `end`."""
        for group, window in enumerate(self.kv_windows):
            for position in range(self._first_seen(window, start), end):
                slot = self._slot_of(row, group, position)
                if slot < 0 or self._memory[slot] != (row.digests[position], group):
                    block_id = slot // self.block_size
                    raise PlanViolation(f"{request_id} at {position} reads what is not its own: {block_id=} {group=}")

    def _first_seen(self, window: int | None, position: int) -> int:
        return 0 if window is None else max(0, position + 1 - window)

    def _used_blocks(self, row: Row) -> list[int]:
        """Those that the tokens to come will see or be written to; what stands before them is out of date."""
        return [
            block_id
            for group, window in enumerate(self.kv_windows)
            for block_id in row.block_ids[group :: len(self.kv_windows)][
                self._first_seen(window, row.num_computed_tokens) // self.block_size :
            ]
        ]

    def _slot_of(self, row: Row, group: int, position: int) -> int:
        place, offset = divmod(position, self.block_size)
        return row.block_ids[place * len(self.kv_windows) + group] * self.block_size + offset


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanViolation(message)
