"""Log-probabilities for the rows that ask: of the token drawn, its rank, and of the most likely tokens.

The sampler imports it. They describe the model, so they come from its raw logits: before bias, penalties and
temperature.
"""

from __future__ import annotations

import numpy as np
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


# True if a row's log-probabilities are those of the tokens that its grammar allows. Without a grammar they are those of
# all tokens: `allowed_token_ids` and `bad_words` do not change the model's distribution.
OF_GRAMMAR = Column(
    "of_grammar", np.bool_, False, lambda request: request.sampling.structured_output is not None, host_only=True
)


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
        """Return an entry with `every` in the form for this row's request: the named tokens, then the sampled one."""
        token_ids = self._token_ids.get(row)
        if token_ids is None or entry.every is None:
            return entry
        named = dict(zip(token_ids.tolist(), np.frombuffer(entry.every, np.float32)[token_ids].tolist(), strict=True))
        named.setdefault(entry.token_id, entry.logprob)
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, list(named.items()))


def token_logprobs(
    raw_logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """What each row asked for. `raw_logits` is [A, vocab], the others are [A]; `num_logprobs` may hold zeros.

    The rank is one more than the number of tokens with a strictly greater logit. Row by row, so that the bits do not
    depend on the batch, and a row stays in the processor's cache until it is done.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that are not sound are found elsewhere
        return [
            _entry(logits, token_id, count)
            for logits, token_id, count in zip(raw_logits, token_ids.tolist(), num_logprobs.tolist(), strict=True)
        ]


def _entry(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    rank = int(np.count_nonzero(logits > logits[token_id])) + 1
    if count == EVERY:
        return TokenLogprobs(token_id, float(logprobs[token_id]), rank, [], every=logprobs.tobytes())
    top = _largest(logits, count)
    return TokenLogprobs(
        token_id, float(logprobs[token_id]), rank, list(zip(top.tolist(), logprobs[top].tolist(), strict=True))
    )


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The indices of the `count` largest of float32 [n], or of all, descending; of equal ones the lowest first."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    columns = 16 * count
    if columns * 4 > len(values):
        return np.argsort(-values, kind="stable")[:count]
    # The largest of each of many groups: as many as are wanted reach a level, and few others do.
    level = np.partition(values[: len(values) // columns * columns].reshape(-1, columns).max(0), -count)[-count]
    candidates = np.flatnonzero(values >= level if level > -np.inf else values > level)
    if len(candidates) < count:  # -inf is all that is left
        candidates = np.concatenate([candidates, np.flatnonzero(values == -np.inf)[: count - len(candidates)]])
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]
