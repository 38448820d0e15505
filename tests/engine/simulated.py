"""An executor without a device, for every test that is about the engine and not about a model.

Its KV memory is real in the one way that matters here: each slot remembers which token stood there, at which position
and after what. Every step reads all earlier positions of its requests through their block tables, and a slot that does
not hold exactly what this sequence needs there is a `PlanViolation`: a block lost, shared wrongly, reused too early or
never written is caught in the very step that would have computed with it.

The next token is a function of the sequence alone, so `expected_output` says what any request must give, whatever it
was batched with, however it was chunked, preempted or shared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages import FinishReason, SamplingParams, TokenLogprobs
from engine.scheduler.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput

_MASK = 2**64 - 1
_EMPTY = 0x9E3779B97F4A7C15  # the digest of no tokens


class PlanViolation(BaseException):
    """The scheduler gave a plan that would corrupt memory.

    Not an Exception: the engine survives those by ending requests, and this must end the test.
    """


class Slot(NamedTuple):
    """What one KV slot holds: the token, its position, and a digest of the sequence up to and including it."""

    token_id: int
    position: int
    digest: int


@dataclass
class _Row:
    """What the executor knows of one request, built from plan diffs alone."""

    slots: list[Slot]  # one for each token known: what the KV memory holds when it has been computed
    num_computed_tokens: int
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def append(self, token_id: int) -> None:
        self.slots.append(Slot(token_id, len(self.slots), _extend(self.slots[-1].digest, token_id)))


class _Finished:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class SimulatedExecutor:
    """An `engine.core.executor.Executor` over simulated KV memory.

    `before_step` is called with each plan after its diffs have been applied and before anything is computed; it may
    wait (a slow device) or raise (a broken one). `how_many` is asked how many of the tokens that a step may sample of a
    request it gives, all of them if it is not set. What is computed for the others is written and worth nothing.
    `plans` keeps every plan, `computed` counts how many tokens of each request were computed, with repetitions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        step_seconds: float = 0.0,
        before_step: Callable[[SchedulerOutput], None] | None = None,
        how_many: Callable[[int], int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step_seconds = step_seconds
        self.before_step = before_step
        self.how_many = how_many
        self.pipeline_depth = 1
        self.plans: list[SchedulerOutput] = []
        self.computed: Counter[str] = Counter()
        self.is_shut_down = False
        self._slots: list[Slot | None] = [None] * (num_blocks * block_size)
        self._rows: dict[str, _Row] = {}
        self._introduced: set[str] = set()

    @property
    def known_request_ids(self) -> set[str]:
        """Requests that hold a row here."""
        return set(self._rows)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> _Finished:
        if self.is_shut_down:
            raise PlanViolation("a plan after the shutdown")
        self.plans.append(plan)
        return _Finished(self._execute(plan))

    def _execute(self, plan: SchedulerOutput, outdated: Collection[str] = ()) -> ModelRunnerOutput:
        """Run a plan. What it says of the `outdated` is wrong, and what is computed for them is for nobody."""
        self._apply(plan)
        self._check(plan, outdated)
        if self.before_step is not None:
            self.before_step(plan)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return self._run(plan)

    def shutdown(self) -> None:
        self.is_shut_down = True

    # --- diffs

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed_request_ids:
            _require(request_id in self._introduced, f"{request_id} is removed but was never introduced")
            self._rows.pop(request_id, None)
        for new in plan.new_requests:
            self._introduce(new)
        introduced = {new.request_id for new in plan.new_requests}
        for request_id, block_ids in plan.new_block_ids.items():
            _require(request_id in self._rows, f"blocks for {request_id}, which is unknown")
            _require(request_id not in introduced, f"blocks for {request_id} twice in one plan")
            _require(bool(block_ids), f"an empty list of new blocks for {request_id}")
            self._rows[request_id].block_ids += block_ids

    def _introduce(self, new: NewRequestData) -> None:
        _require(new.request_id not in self._rows, f"{new.request_id} is introduced twice")
        _require(0 <= new.num_computed_tokens < len(new.token_ids), f"{new.request_id} has nothing to compute")
        _require(0 < new.num_prompt_tokens <= len(new.token_ids), f"{new.request_id} has more prompt than tokens")
        self._introduced.add(new.request_id)
        row = _Row(
            slots=[
                Slot(token_id, position, digest)
                for position, (token_id, digest) in enumerate(
                    zip(new.token_ids, digests_of(new.token_ids), strict=True)
                )
            ],
            num_computed_tokens=new.num_computed_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            block_ids=list(new.block_ids),
            sampling=new.sampling,
            stop_token_ids=list(new.stop_token_ids),
        )
        self._rows[new.request_id] = row

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
            _require(end <= len(row.block_ids) * self.block_size, f"the block table of {request_id} is too short")
            _require(len(set(row.block_ids)) == len(row.block_ids), f"{request_id} holds a block twice")
            _require(all(0 <= i < self.num_blocks for i in row.block_ids), f"{request_id} has a block out of range")

    # --- memory

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        steps = [
            (request_id, self._rows[request_id], num_tokens)
            for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)
        ]
        # What a request builds on was there before the step, and nobody overwrites it during the step.
        for request_id, row, _ in steps:
            self._read(request_id, row, row.num_computed_tokens)
        masks = {}
        if plan.masks is not None:
            found = plan.masks.result()
            masks = dict(zip(found.indices.tolist(), found.bits, strict=True))
        sampled: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        written: dict[int, Slot] = {}
        for index, (request_id, row, num_tokens) in enumerate(steps):
            start, num_known = row.num_computed_tokens, row.num_tokens
            end = start + num_tokens
            token_ids = self._sample(row, max(0, end - num_known + 1), masks.get(index))
            if token_ids and row.sampling.logprobs is not None:
                logprobs[index] = [_logprobs(token_id, row.sampling.logprobs) for token_id in token_ids]
            sampled.append(token_ids)
            row.num_computed_tokens = min(end, num_known - 1 + len(token_ids))
            for position in range(start, end):
                slot = self._slot_of(row, position)
                right = position < max(row.num_computed_tokens, num_known)
                value = row.slots[position] if right else Slot(-1, position, 0)  # of a draft that was not taken
                _require(written.setdefault(slot, value) == value, f"{request_id} overwrites what another one writes")
                self._slots[slot] = value
            self.computed[request_id] += num_tokens
        for request_id, row, _ in steps:
            self._read(request_id, row, row.num_computed_tokens)
        return ModelRunnerOutput(sampled_token_ids=sampled, logprobs=logprobs)

    def _sample(self, row: _Row, most: int, mask: NDArray[np.uint32] | None) -> list[int]:
        """The next tokens of a row, which has them afterwards. A mask holds for the first alone."""
        _require(mask is None or most <= 1, "several tokens behind one mask")
        token_ids: list[int] = []
        for _ in range(self.how_many(most) if self.how_many is not None and most else most):
            num_outputs = row.num_tokens - row.num_prompt_tokens
            token_id = _pick(row.slots[-1].digest, num_outputs, row.sampling, row.stop_token_ids, self.vocab_size)
            if mask is not None:
                token_id = _next_allowed(mask, token_id, self.vocab_size)
            row.append(token_id)
            token_ids.append(token_id)
        return token_ids

    def _read(self, request_id: str, row: _Row, end: int) -> None:
        for position in range(end):
            found = self._slots[self._slot_of(row, position)]
            if found != row.slots[position]:
                block_id = row.block_ids[position // self.block_size]
                raise PlanViolation(
                    f"{request_id} at position {position} reads {found} in block {block_id}: not its own"
                )

    def _slot_of(self, row: _Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size


@dataclass(frozen=True)
class ExpectedOutput:
    """What a request must give."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def expected_output(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: Sequence[int] = (),
) -> ExpectedOutput:
    """Computed directly from the sequence, without blocks, batches or a scheduler."""
    eos = set() if sampling.ignore_eos else set(eos_token_ids)
    digest = digests_of(prompt)[-1]
    output: list[int] = []
    while True:
        token_id = _pick(digest, len(output), sampling, sorted(eos.union(sampling.stop_token_ids)), vocab_size)
        digest = _extend(digest, token_id)
        output.append(token_id)
        if len(output) >= sampling.min_tokens and token_id in eos:
            return ExpectedOutput(output, FinishReason.STOP, None)
        if len(output) >= sampling.min_tokens and token_id in sampling.stop_token_ids:
            return ExpectedOutput(output, FinishReason.STOP, token_id)
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return ExpectedOutput(output, FinishReason.LENGTH, None)


def digests_of(token_ids: Sequence[int]) -> list[int]:
    """The rolling digest after each of these tokens."""
    digests: list[int] = []
    for token_id in token_ids:
        digests.append(_extend(digests[-1] if digests else _EMPTY, token_id))
    return digests


def _extend(digest: int, token_id: int) -> int:
    mixed = ((digest ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def _pick(digest: int, num_outputs: int, sampling: SamplingParams, stop_token_ids: list[int], vocab_size: int) -> int:
    """The next token: fixed by the sequence, and by the seed unless greedy; stop tokens are masked until min_tokens."""
    seed = 0 if sampling.greedy else sampling.seed or 0
    token_id = (_extend(digest, seed) >> 7) % vocab_size
    if num_outputs < sampling.min_tokens:
        while token_id in stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=[(token_id, -0.5)][:num_top])


def _next_allowed(bits: NDArray[np.uint32], token_id: int, vocab_size: int) -> int:
    """The first token from `token_id` on, and around, that a mask allows."""
    for _ in range(vocab_size):
        if bits[token_id // 32] >> (token_id % 32) & 1:
            return token_id
        token_id = (token_id + 1) % vocab_size
    raise PlanViolation("a mask that allows nothing")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanViolation(message)
