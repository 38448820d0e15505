"""Log-probabilities of prompts' tokens and pooled or whole hidden states, for both runners.

Few requests want these outputs; a step without such requests costs one look at an empty dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import Pooling, TokenLogprobs
from engine.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from gpu.runner.rows import StepShape
from gpu.sampling.columns import how_many


@dataclass
class _Prompt:
    """A request that wants prompt outputs, and the sum of its hidden states so far, or all of them."""

    token_ids: NDArray[np.int64]  # [P]
    num_logprobs: int | None
    pooling: Pooling | None
    total: NDArray[np.float32] | None = None  # [hidden], or [tokens, hidden]


class HiddenStates(Protocol):
    """The last hidden states of a step's T tokens, on the host or a device."""

    def rows(self, part: slice) -> NDArray[np.float32]:
        """Return the hidden states of these tokens, [n, hidden]."""

    def logprobs(self, part: slice, token_ids: NDArray[np.int64], num_logprobs: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens that follow these tokens, `token_ids` [n]."""


class PromptOutputs:
    """The requests that want prompt outputs, from the plan that adds to the plan that removes each. Not thread-safe.

    Logits are computed for at most `max_logits_rows` positions at a time, because those of a whole chunk would take
    hundreds of megabytes.
    """

    def __init__(self, max_logits_rows: int) -> None:
        self._max_logits_rows = max_logits_rows
        self._asking: dict[str, _Prompt] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        """Apply a plan's removals and new requests."""
        for request_id in plan.removed_request_ids:
            self._asking.pop(request_id, None)
        for request in plan.new_requests:
            if request.sampling.prompt_logprobs is not None or request.pooling is not None:
                self._asking[request.request_id] = _prompt(request)

    @property
    def is_asked(self) -> bool:
        """True if any request wants prompt outputs."""
        return bool(self._asking)

    def add_to(self, output: ModelRunnerOutput, plan: SchedulerOutput, shape: StepShape, hidden: HiddenStates) -> None:
        """Add the step's prompt outputs to its `output`."""
        if not self._asking:
            return
        for place, index in enumerate(shape.order.tolist()):
            prompt = self._asking.get(plan.request_ids[index])
            if prompt is None:
                continue
            end = int(shape.seq_lens[place])
            start = end - int(shape.query_lens[place])
            if start >= len(prompt.token_ids):
                continue  # its prompt is complete
            first = int(shape.query_start_loc[place])
            if prompt.num_logprobs is not None:
                output.prompt_logprobs[index] = self._logprobs(prompt, hidden, first, start, end)
            if prompt.pooling is not None:
                _pool(prompt, hidden.rows(slice(first, first + min(end, len(prompt.token_ids)) - start)))
                if end >= len(prompt.token_ids):
                    output.embeddings[index] = _pooled(prompt)

    def _logprobs(self, prompt: _Prompt, hidden: HiddenStates, first: int, start: int, end: int) -> list[TokenLogprobs]:
        """Return log-probabilities for positions `start` + 1 on, because a hidden state gives the probability of the
        next token. The prompt's tokens `start` to `end` are the step's tokens from `first` on."""
        targets = prompt.token_ids[start + 1 : end + 1]
        entries: list[TokenLogprobs] = []
        for begin in range(0, len(targets), self._max_logits_rows):
            part = targets[begin : begin + self._max_logits_rows]
            rows = slice(first + begin, first + begin + len(part))
            entries += hidden.logprobs(rows, part, prompt.num_logprobs or 0)
        return entries


def _prompt(request: NewRequestData) -> _Prompt:
    token_ids = np.array(request.token_ids[: request.num_prompt_tokens], dtype=np.int64)
    asked = request.sampling.prompt_logprobs
    return _Prompt(token_ids, None if asked is None else how_many(asked), request.pooling)


def _pool(prompt: _Prompt, rows: NDArray[np.float32]) -> None:
    if prompt.pooling is Pooling.LAST:
        prompt.total = rows[-1]
        return
    # Row after row, so that the bits do not depend on how the prompt was cut into chunks.
    is_whole = prompt.pooling is Pooling.TOKENS
    before = [] if prompt.total is None else [prompt.total if is_whole else prompt.total[None]]
    together = np.concatenate([*before, rows])
    prompt.total = together if is_whole else np.add.reduce(together, axis=0)


def _pooled(prompt: _Prompt) -> bytes:
    assert prompt.total is not None
    vector = prompt.total / np.float32(len(prompt.token_ids)) if prompt.pooling is Pooling.MEAN else prompt.total
    return vector.tobytes()
