"""Log-probabilities for the rows that ask: of the token drawn, its rank, and of the most likely tokens.

The sampler imports it. They describe the model, so they come from its raw logits: before bias, penalties and
temperature.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import ALL_LOGPROBS, TokenLogprobs
from engine.scheduler.plan import NewRequestData
from gpu.columns import Column

EVERY = 2**31 - 1  # instead of how many: the whole vocabulary's, of which few may be picked


def how_many(asked: int | None) -> int:
    """What a request asks for as a number of tokens; -1 is none."""
    return -1 if asked is None else EVERY if asked == ALL_LOGPROBS else asked


def _num_logprobs(request: NewRequestData) -> int:
    sampling = request.sampling
    return EVERY if sampling.logprob_token_ids else how_many(sampling.logprobs)


# -1 is none, 0 the sampled token's only.
NUM_LOGPROBS = Column("num_logprobs", np.int64, -1, _num_logprobs, host_only=True)


class NamedTokens:
    """The tokens that requests name to hear their log-probabilities. The row table keeps one for all its rows."""

    def __init__(self) -> None:
        self._token_ids: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, request: NewRequestData) -> None:
        if request.sampling.logprob_token_ids:
            self._token_ids[row] = np.array(request.sampling.logprob_token_ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        self._token_ids.pop(row, None)

    def told(self, row: int, entry: TokenLogprobs) -> TokenLogprobs:
        """An entry that has `every`, as the request in this row wants it."""
        token_ids = self._token_ids.get(row)
        if token_ids is None or entry.every is None:
            return entry
        named = zip(token_ids.tolist(), np.frombuffer(entry.every, np.float32)[token_ids].tolist(), strict=True)
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, list(named))


def token_logprobs(
    raw_logits: torch.Tensor, token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """What each row asked for. `raw_logits` is float32 [A, vocab], the others are [A]; `num_logprobs` may hold zeros.

    The rank is one more than the number of tokens with a strictly greater logit.
    """
    chosen_ids = torch.from_numpy(token_ids).to(raw_logits.device).unsqueeze(1)
    chosen_logits = raw_logits.gather(1, chosen_ids)
    # Not logsumexp: log_softmax works through each row on its own, so the bits do not depend on the batch.
    logprobs = raw_logits.log_softmax(-1)
    chosen = logprobs.gather(1, chosen_ids).squeeze(1).tolist()
    ranks = ((raw_logits > chosen_logits).sum(-1) + 1).tolist()
    counts = num_logprobs.tolist()
    if EVERY in counts:
        every = {i: logprobs[i].cpu().numpy().tobytes() for i, count in enumerate(counts) if count == EVERY}
        counts = [0 if count == EVERY else count for count in counts]
    else:
        every = {}
    top = logprobs.topk(min(max(counts), logprobs.shape[-1]))
    entries = [
        TokenLogprobs(token_id, logprob, rank, list(zip(top_ids[:count], top_values[:count], strict=True)))
        for token_id, logprob, rank, count, top_ids, top_values in zip(
            token_ids.tolist(), chosen, ranks, counts, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
    for i, values in every.items():
        entries[i].every = values
    return entries
