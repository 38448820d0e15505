"""An executor without a device that says something: it takes plans, gives tokens, and has what a step costs pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.config import Clock
from engine.executor import StepHandle
from engine.messages import SamplingParams, TokenLogprobs
from engine.plan import KVWindows, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.simulation.counting import SimulatedStep
from tests.engine.simulated_tokens import digests_of, extend_digest, next_token


@dataclass
class Row:
    """What the executor knows of one request, built from plan diffs alone."""

    digests: list[int]  # one for each token known, of the sequence up to it
    num_computed_tokens: int
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: list[int]

    @classmethod
    def of(cls, new: NewRequestData) -> Row:
        return cls(
            digests=digests_of(new.token_ids),
            num_computed_tokens=new.num_computed_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            block_ids=list(new.block_ids),
            sampling=new.sampling,
            stop_token_ids=list(new.stop_token_ids),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.digests)


class SimulatedExecutor:
    """An `engine.executor.Executor`. What a step gives is known at once; its result comes when its time is over.

    `cost` says how many seconds a plan takes, which begin when the step before it has ended; whoever asks for the
    result sleeps until then. `how_many` is asked how many of the tokens that a step may sample of a request it gives,
    all of them if it is not set.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        cost: Callable[[SchedulerOutput], float] = lambda plan: 0.0,
        how_many: Callable[[int], int] | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.cost = cost
        self.how_many = how_many
        self.pipeline_depth = 1
        self.kv_windows: KVWindows = (None,)
        self._clock = clock
        self._sleep = sleep
        self._busy_until = 0.0
        self._rows: dict[str, Row] = {}

    @property
    def known_request_ids(self) -> set[str]:
        """Requests that hold a row here."""
        return set(self._rows)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        output = self._execute(plan)
        self._busy_until = end = max(self._busy_until, self._clock()) + self.cost(plan)
        return SimulatedStep(output, lambda: self._sleep(max(0.0, end - self._clock())))

    def shutdown(self) -> None: ...

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(plan)
        return self._run(plan)

    def _apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's diffs."""
        for request_id in plan.removed_request_ids:
            self._rows.pop(request_id, None)
        for new in plan.new_requests:
            self._rows[new.request_id] = Row.of(new)
        for request_id, block_ids in plan.new_block_ids.items():
            self._rows[request_id].block_ids += block_ids

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Advance every request of a plan."""
        masks = {}
        if plan.masks is not None:
            found = plan.masks.result()
            masks = dict(zip(found.indices.tolist(), found.bits, strict=True))
        output = ModelRunnerOutput(sampled_token_ids=[], logprobs={})
        scheduled = zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)
        for index, (request_id, num_tokens) in enumerate(scheduled):
            row = self._rows[request_id]
            num_known, end = row.num_tokens, row.num_computed_tokens + num_tokens
            # From the last known token on, a token may be sampled at every position.
            token_ids = self._sample(row, max(0, end - num_known + 1), masks.get(index))
            row.num_computed_tokens = min(end, num_known - 1 + len(token_ids))
            output.sampled_token_ids.append(token_ids)
            if token_ids and row.sampling.logprobs is not None:
                output.logprobs[index] = [_logprobs(token_id, row.sampling.logprobs) for token_id in token_ids]
        return output

    def _sample(self, row: Row, most: int, mask: NDArray[np.uint32] | None) -> list[int]:
        """The next tokens of a row, which has them afterwards. A mask holds for one token."""
        if mask is not None and most > 1:
            raise ValueError(f"{most} tokens behind one mask")
        token_ids: list[int] = []
        for _ in range(self.how_many(most) if self.how_many is not None and most else most):
            num_outputs = row.num_tokens - row.num_prompt_tokens
            token_id = next_token(row.digests[-1], num_outputs, row.sampling, row.stop_token_ids, self.vocab_size)
            if mask is not None:
                token_id = _next_allowed(mask, token_id, self.vocab_size)
            row.digests.append(extend_digest(row.digests[-1], token_id))
            token_ids.append(token_id)
        return token_ids


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=[(token_id, -0.5)][:num_top])


def _next_allowed(bits: NDArray[np.uint32], token_id: int, vocab_size: int) -> int:
    """The first token from `token_id` on, and around, that a mask allows."""
    for _ in range(vocab_size):
        if bits[token_id // 32] >> (token_id % 32) & 1:
            return token_id
        token_id = (token_id + 1) % vocab_size
    raise ValueError("a mask that allows nothing")
