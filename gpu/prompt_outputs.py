"""What a request wants of its prompt besides an answer to it: log-probabilities of its tokens, pooled hidden states.

The model runner imports it. Few requests ask, so a step in which nobody does costs one look at an empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import Pooling, TokenLogprobs
from engine.scheduler.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from gpu.rows import StepShape
from gpu.sampling.logprobs import how_many, token_logprobs


@dataclass
class _Prompt:
    """One request that asks, and what has been summed up of it."""

    token_ids: NDArray[np.int64]  # [P]
    num_logprobs: int | None
    pooling: Pooling | None
    total: torch.Tensor | None = None  # float32 [hidden]


class PromptOutputs:
    """Remembers who asks from the plan that brings a request to the plan that removes it. Not thread-safe.

    Logits are made of at most `max_logits_rows` positions at a time, because those of a whole chunk would take
    hundreds of megabytes.
    """

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor], max_logits_rows: int) -> None:
        self._compute_logits = compute_logits
        self._max_logits_rows = max_logits_rows
        self._asking: dict[str, _Prompt] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's diffs."""
        for request_id in plan.removed_request_ids:
            self._asking.pop(request_id, None)
        for request in plan.new_requests:
            if request.sampling.prompt_logprobs is not None or request.pooling is not None:
                self._asking[request.request_id] = _prompt(request)

    @property
    def is_asked(self) -> bool:
        """Whether anybody is here that asks."""
        return bool(self._asking)

    def add_to(self, output: ModelRunnerOutput, plan: SchedulerOutput, shape: StepShape, hidden: torch.Tensor) -> None:
        """Put what this step gives to those who ask into its `output`. `hidden` is the step's, [T, hidden]."""
        if not self._asking:
            return
        for place, index in enumerate(shape.order.tolist()):
            prompt = self._asking.get(plan.request_ids[index])
            if prompt is None:
                continue
            end = int(shape.seq_lens[place])
            start = end - int(shape.query_lens[place])
            if start >= len(prompt.token_ids):
                continue  # it generates
            rows = hidden[int(shape.query_start_loc[place]) : int(shape.query_start_loc[place + 1])]
            if prompt.num_logprobs is not None:
                output.prompt_logprobs[index] = self._logprobs(prompt, rows, start)
            if prompt.pooling is not None:
                _pool(prompt, rows[: len(prompt.token_ids) - start])
                if end >= len(prompt.token_ids):
                    output.embeddings[index] = _pooled(prompt)

    def _logprobs(self, prompt: _Prompt, rows: torch.Tensor, start: int) -> list[TokenLogprobs]:
        """The hidden state at a position tells the next token's probability: entries for positions `start` + 1 on."""
        targets = prompt.token_ids[start + 1 : start + 1 + len(rows)]
        entries: list[TokenLogprobs] = []
        for first in range(0, len(targets), self._max_logits_rows):
            part = targets[first : first + self._max_logits_rows]
            logits = self._compute_logits(rows[first : first + len(part)]).float()
            entries += token_logprobs(logits, part, np.full(len(part), prompt.num_logprobs))
        return entries


def _prompt(request: NewRequestData) -> _Prompt:
    token_ids = np.array(request.token_ids[: request.num_prompt_tokens], dtype=np.int64)
    asked = request.sampling.prompt_logprobs
    return _Prompt(token_ids, None if asked is None else how_many(asked), request.pooling)


def _pool(prompt: _Prompt, rows: torch.Tensor) -> None:
    if prompt.pooling is Pooling.LAST:
        prompt.total = rows[-1].float()
    else:
        total = rows.sum(0, dtype=torch.float32)
        prompt.total = total if prompt.total is None else prompt.total + total


def _pooled(prompt: _Prompt) -> bytes:
    assert prompt.total is not None
    vector = prompt.total / len(prompt.token_ids) if prompt.pooling is Pooling.MEAN else prompt.total
    return vector.cpu().numpy().tobytes()
