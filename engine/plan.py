"""The plan of one step, its output, and the KV groups of a model.

1. The plan is a diff. The tokens, sampling parameters and block table of a request are sent once, in `NewRequestData`.
   After that the runner keeps a row for it, to which it appends the tokens that it samples; a plan only has the number
   of tokens to compute and the added blocks.
2. Two numbers of the plan say what a step does with a request: how many tokens are computed, and at how many of the
   last of these positions a token may be sampled.

       a chunk of a prefill that goes on     computed > 0, sampled 0
       the last chunk of a prefill           computed > 0, sampled 1
       a decode                              computed = sampled = 1
       a decode that verifies drafts         computed = sampled = 1 + the drafts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.messages import Pooling, SamplingParams, TokenLogprobs

NO_CHECKPOINT = -1  # the state before the first token


class NewRequestData(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """A request that the runner does not know: new, or resumed after a preemption."""

    request_id: str
    token_ids: list[int]  # the prompt and, when resumed, what was generated before
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens with KV in the cache already (prefix hits)
    block_ids: list[int]  # the block table, as described below
    sampling: SamplingParams  # `seed` is always set here
    stop_token_ids: list[int]  # EOS (unless ignored) and the request's own: masked until min_tokens
    pooling: Pooling | None = None
    checkpoint: int = NO_CHECKPOINT  # the state after `num_computed_tokens` tokens, of a model that has states
    second_segment: int = 0  # as in `EngineCoreRequest`, as is `num_unpooled`
    num_unpooled: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenMasks:
    """The tokens that may be sampled by the requests of a plan that have a grammar."""

    indices: NDArray[np.int64]  # [R], ascending, into the plan's requests
    bits: NDArray[np.uint32]  # [R, words]: token t is allowed where bit t % 32 of word t // 32 is set


@runtime_checkable
class MasksHandle(Protocol):
    """Masks that are being computed while the plan runs."""

    def result(self) -> TokenMasks:
        """Wait for the masks. Called when the logits are there."""


class SchedulerOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The requests of a step, how many tokens of each are computed, and how many may be sampled.

    `request_ids`, `num_scheduled_tokens` and `num_sampled_tokens` are parallel and in batch order. The first sampling
    position of a request is that of its last known token; the others are for drafts, of which the runner may have
    fewer. `removed_request_ids` are applied first: the rows of requests that finished, were aborted or were preempted
    since the last plan.
    """

    step: int
    removed_request_ids: list[str]
    new_requests: list[NewRequestData]
    new_block_ids: dict[str, list[int]]  # appended to block tables that the runner has, for whole places
    request_ids: list[str]
    num_scheduled_tokens: list[int]  # computed, at most
    num_sampled_tokens: list[int]  # may be sampled, at most: 0 while a prefill goes on
    total_num_scheduled_tokens: int
    # Copies of requests' states (`engine.scheduler.checkpoints`): after how many tokens, and to which checkpoint.
    checkpoints: dict[str, list[tuple[int, int]]] = {}
    masks: MasksHandle | None = None  # of the requests that have a grammar, even if they do not sample in this step

    @classmethod
    def made_up(
        cls,
        removed_request_ids: list[str],
        new_requests: list[NewRequestData],
        request_ids: list[str],
        num_scheduled_tokens: list[int],
        num_sampled_tokens: list[int],
    ) -> Self:
        """Make a plan without a scheduler, for warm-up and for measurements."""
        return cls(
            step=0,
            removed_request_ids=removed_request_ids,
            new_requests=new_requests,
            new_block_ids={},
            request_ids=request_ids,
            num_scheduled_tokens=num_scheduled_tokens,
            num_sampled_tokens=num_sampled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens),
        )

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of requests that do not decode. In a decode every position may be sampled."""
        if self.num_scheduled_tokens == self.num_sampled_tokens:  # the usual case, at a fraction of the cost
            return 0
        both = zip(self.num_scheduled_tokens, self.num_sampled_tokens, strict=True)
        return sum(num_tokens for num_tokens, num_sampled in both if num_tokens > num_sampled)


class ModelRunnerOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The output of one step. `sampled_token_ids` is parallel to the plan's `request_ids`: the tokens that each request
    gained, from none to as many as the plan allows. Afterwards a request that samples is exactly one token behind:
    computed positions of rejected drafts do not count."""

    sampled_token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]]  # of the sampled tokens, by index into the batch, for requests that asked
    not_finite: list[int] = []  # indices of requests with NaN or infinity in the logits: their tokens mean nothing
    # By index, for requests that asked: log-probabilities of the prompt tokens that follow the tokens of this step.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # by index, when the prompt is complete: float32 [hidden]


# ------------------------------------------------------------------------------------------------------------ kv groups
# Layers that keep the KV of the same tokens (all, or a window of the latest) form one or several groups of equal size.
# A block has room for `block_size` tokens in the layers of one group, and any block can serve any group: there is one
# pool. `ModelFacts.kv_windows` has the window of each group, or None.
#
# A block table is flat: for each place, which is `block_size` tokens, one block of every group, in their order. The
# block of a group is freed when no later token can see any of its tokens; then its entry is `NO_BLOCK`.


NO_BLOCK = -1

KVWindows = Sequence[int | None]  # of each group: how many tokens a query sees, itself included; None: all


def owned(block_ids: Iterable[int]) -> list[int]:
    """Return the blocks of a table without the freed ones."""
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def most_blocks(windows: KVWindows, block_size: int, num_tokens: int, max_step_tokens: int) -> int:
    """Return the maximum number of blocks that a request of `num_tokens` tokens owns at any time, if at most
    `max_step_tokens` of them are in flight."""
    everything = -(-num_tokens // block_size)
    return sum(
        everything if window is None else min(everything, most_in_window(window, block_size, max_step_tokens))
        for window in windows
    )


def most_in_window(window: int, block_size: int, step_tokens: int) -> int:
    """Return the number of blocks of one group with the tokens that a step of `step_tokens` tokens writes or sees."""
    return -(-(window - 1 + step_tokens) // block_size) + 1
