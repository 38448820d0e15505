"""The plan of one step, its output, and the KV groups of a model.

The plan is a diff. A request's tokens, sampling parameters and block table are sent once, in `NewRequestData`; after
that the runner keeps its own row and is told only who runs, for how many tokens, and which blocks were added. The
runner appends the tokens it samples to its own row, so they never travel back down.

What a step is to a request stands in two numbers of the plan, and nobody deduces it from anything else: how many tokens
are computed, and at how many of these positions, the last ones, a token may be sampled.

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


class NewRequestData(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """A request that the runner does not know: new, or resumed after a preemption."""

    request_id: str
    token_ids: list[int]  # the prompt and, when resumed, what was generated before
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose KV is in the cache already (prefix hits)
    block_ids: list[int]  # the block table, as described above
    sampling: SamplingParams  # `seed` is always set here
    stop_token_ids: list[int]  # EOS (unless ignored) and the request's own: masked until min_tokens
    pooling: Pooling | None = None


@dataclass(frozen=True, kw_only=True)
class TokenMasks:
    """Which tokens the requests of a plan that have a grammar may sample."""

    indices: NDArray[np.int64]  # [R], ascending, into the plan's requests
    bits: NDArray[np.uint32]  # [R, words]: token t is allowed where bit t % 32 of word t // 32 is set


@runtime_checkable
class MasksHandle(Protocol):
    """Masks that are being computed while the plan runs."""

    def result(self) -> TokenMasks:
        """Wait until they are there. Asked for when the logits are."""
        ...


class SchedulerOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """Who runs in this step, how many tokens of each are computed, and how many may be sampled.

    `request_ids`, `num_scheduled_tokens` and `num_sampled_tokens` are parallel and in batch order. Where a request
    samples, the first of its sampling positions is that of the last token known of it; behind it stand drafts, of which
    the runner may have fewer than there is room for. `removed_request_ids` are applied first: the rows of requests that
    finished, were aborted or were preempted since the last plan.
    """

    step: int
    removed_request_ids: list[str]
    new_requests: list[NewRequestData]
    new_block_ids: dict[str, list[int]]  # appended to block tables that the runner knows, for whole places
    request_ids: list[str]
    num_scheduled_tokens: list[int]  # computed, at most
    num_sampled_tokens: list[int]  # may be sampled, at most: 0 while a prefill goes on
    total_num_scheduled_tokens: int
    masks: MasksHandle | None = None  # of the requests that have a grammar, whether they sample in this step or not

    @classmethod
    def made_up(
        cls,
        removed_request_ids: list[str],
        new_requests: list[NewRequestData],
        request_ids: list[str],
        num_scheduled_tokens: list[int],
        num_sampled_tokens: list[int],
    ) -> Self:
        """Of no scheduler: for steps that rehearse or measure what a runner does."""
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
        """Of all but those that decode, whose every position may yield a token."""
        if self.num_scheduled_tokens == self.num_sampled_tokens:  # the usual case, at a fraction of the cost
            return 0
        both = zip(self.num_scheduled_tokens, self.num_sampled_tokens, strict=True)
        return sum(num_tokens for num_tokens, num_sampled in both if num_tokens > num_sampled)


class ModelRunnerOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """What one step produced. `sampled_token_ids` is parallel to the plan's `request_ids`: as many tokens of each as it
    gained, from none to as many as the plan allows. Whoever samples stands one token behind afterwards, whatever it
    gained: what was computed for drafts that were not taken does not count."""

    sampled_token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]]  # of these tokens, by index into the batch, for requests that asked
    not_finite: list[int] = []  # indices whose logits held NaN or infinity: their tokens mean nothing
    # By index, for requests that asked: of the prompt tokens that come after those of this step, the last excepted.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # by index, when the prompt is complete: float32 [hidden]


# ------------------------------------------------------------------------------------------------------------ kv groups
# KV groups: what the layers of a model keep of a request, and so what a block table is.
#
# Layers that keep the same (all tokens, or a window of the latest) are in one or several groups of equal size. A block
# has room for `block_size` tokens in the layers of one group, and any block serves any group: there is one pool.
# `ModelFacts.kv_windows` has the window of each group, or None.
#
# A block table is flat: for each place, which is `block_size` tokens, one block of every group, in their order. A group
# gives a block back when no token to come sees any of its tokens; then `NO_BLOCK` stands there.


NO_BLOCK = -1

KVWindows = Sequence[int | None]  # of each group: how many tokens a query sees, itself included; None: all


def owned(block_ids: Iterable[int]) -> list[int]:
    """The blocks of a table that are there."""
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def most_blocks(windows: KVWindows, block_size: int, num_tokens: int, max_step_tokens: int) -> int:
    """The most blocks that a request of `num_tokens` tokens owns at any time, when no more than `max_step_tokens` of
    them are planned and not accounted for."""
    everything = -(-num_tokens // block_size)
    return sum(
        everything if window is None else min(everything, most_in_window(window, block_size, max_step_tokens))
        for window in windows
    )


def most_in_window(window: int, block_size: int, step_tokens: int) -> int:
    """In how many blocks of one group the tokens lie that a step of `step_tokens` tokens writes or sees."""
    return -(-(window - 1 + step_tokens) // block_size) + 1
