"""`sample`: a step's logits in, one token and its log-probabilities per row out.

A row's token depends on nothing but that row's logits, parameters, seed and position: every operation works on rows
independently, and the randomness is counter-based. The order of operations is vLLM's, because clients tune their
parameters to it:

0. tokens that the request's grammar does not allow get -inf;
1. log-probabilities are taken from the raw logits; without a grammar, before tokens outside `allowed_token_ids` and in
   `bad_words` get -inf;
2. logit bias, and -1e9 for stop tokens until min_tokens are generated;
3. repetition, then frequency and presence penalties;
4. greedy rows: the largest logit, the lowest id where several are largest;
5. other rows: temperature, min-p, top-k, top-p, then the token at which the cumulative distribution, in order of token
   id, passes the row's one uniform number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.plan import NewRequestData
from gpu.sampling.columns import EVERY, FILTERS, TEMPERATURE
from gpu.sampling.draw import largest, uniform
from gpu.sampling.logits import LogitsMask, Penalties, SparseBias, apply_mask, apply_penalties

if TYPE_CHECKING:
    from gpu.sampling.draw import Shards


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """The result of sampling S rows of logits."""

    token_ids: NDArray[np.int64]  # [S], always a valid id
    # bool [S]. False where the logits hold NaN or +inf, or nothing but -inf: the token of that row means nothing.
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]  # by row, only for rows that asked


class Draw(Protocol):
    """A way to draw tokens: `gpu.cpu.library` does it in C++, `gpu.sampling.draw` in numpy."""

    def __call__(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draw one token for each row of `logits`, [S, vocab], which may be overwritten.

        The parameters are [S] each: temperature, top_k, top_p and min_p as their columns have them, and float64 numbers
        below 1, one for each draw. The filters are min-p first, then top-k, then top-p on the rest; tokens that tie
        with the last one kept are kept.

        Returns int64 [S], and bool [S], False where a row is no distribution and its token means nothing.
        """


def sample(
    logits: NDArray[np.float32], metadata: SamplingMetadata, draw: Draw, shards: Shards | None = None
) -> SamplerOutput:
    """Sample one token for each row of `logits` ([S, vocab], may be overwritten). With `shards` these are of a rank's
    own tokens, and all ranks sample together."""
    pick = largest
    if shards is not None:
        metadata = metadata.of_tokens(shards.first, shards.last)
        pick, draw = shards.largest, shards.draw
    greedy = metadata["temperature"] == 0.0
    num_logprobs = metadata["num_logprobs"]
    asking = np.flatnonzero(num_logprobs >= 0)
    raw_logits = logits[asking] if len(asking) else None
    if metadata.mask is not None:
        apply_mask(logits, metadata.mask)
        if raw_logits is not None:
            of_grammar = metadata["of_grammar"][asking]
            raw_logits[of_grammar] = logits[asking[of_grammar]]

    if (bias := metadata.bias) is not None:
        np.add.at(logits, (bias.rows, bias.token_ids), bias.values)  # a stop token may carry a bias too
    if metadata.penalties is not None:
        apply_penalties(logits, metadata.penalties)

    if greedy.all():
        token_ids, finite = pick(logits)
    elif not greedy.any():
        token_ids, finite = _drawn(logits, metadata, draw)
    else:
        token_ids = np.empty(len(greedy), dtype=np.int64)
        finite = np.empty(len(greedy), dtype=bool)
        chosen, drawn = np.flatnonzero(greedy), np.flatnonzero(~greedy)
        token_ids[chosen], finite[chosen] = pick(logits[chosen])
        token_ids[drawn], finite[drawn] = _drawn(logits[drawn], metadata.drawing(drawn), draw)

    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits is not None:
        if shards is not None:
            raw_logits = shards.whole(raw_logits)
        structs = token_logprobs(raw_logits, token_ids[asking], num_logprobs[asking])
        logprobs = dict(zip(asking.tolist(), structs, strict=True))
    return SamplerOutput(token_ids=token_ids, finite=finite, logprobs=logprobs)


def _drawn(
    logits: NDArray[np.float32], metadata: SamplingMetadata, draw: Draw
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    parameters = [metadata[column.name] for column in (TEMPERATURE, *FILTERS)]
    return draw(logits, *parameters, uniform(metadata["seed"], metadata.positions))


# ------------------------------------------------------------------------------------------------------------- logprobs
# For the rows that ask: the log-probability of the token drawn, its rank, and those of the most likely tokens. They
# describe the model, so they come from its raw logits, before bias, penalties and temperature.


class NamedTokens:
    """The tokens for which requests want log-probabilities, by row. A row table has one `NamedTokens`."""

    def __init__(self) -> None:
        self._token_ids: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, request: NewRequestData) -> None:
        if request.sampling.logprob_token_ids:
            self._token_ids[row] = np.array(request.sampling.logprob_token_ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        self._token_ids.pop(row, None)

    def answer(self, row: int, entry: TokenLogprobs) -> TokenLogprobs:
        """Return the entry for the row's request: the tokens that it names, and the sampled one, replace `every`."""
        token_ids = self._token_ids.get(row)
        if token_ids is None or entry.every is None:
            return entry
        named = dict(zip(token_ids.tolist(), np.frombuffer(entry.every, np.float32)[token_ids].tolist(), strict=True))
        named.setdefault(entry.token_id, entry.logprob)
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, list(named.items()))


def token_logprobs(
    raw_logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Return the entries that rows ask for. `raw_logits` is [A, vocab], the others are [A]; `num_logprobs` may hold 0.

    The rank is one more than the number of tokens with a strictly greater logit. Row by row, so that the bits do not
    depend on the batch, and a row stays in the processor's cache until it is done.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # rows with NaN or infinity are found elsewhere
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
    """Return the indices of the `count` largest of float32 [n], or of all, descending; of equal ones the lowest
    first."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    columns = 16 * count
    if columns * 4 > len(values):
        return np.argsort(-values, kind="stable")[:count]
    # The largest numbers of many groups give a level that at least `count` numbers reach, and few others do.
    level = np.partition(values[: len(values) // columns * columns].reshape(-1, columns).max(0), -count)[-count]
    candidates = np.flatnonzero(values >= level if level > -np.inf else values > level)
    if len(candidates) < count:  # -inf is all that is left
        candidates = np.concatenate([candidates, np.flatnonzero(values == -np.inf)[: count - len(candidates)]])
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


# ------------------------------------------------------------------------------------------------------------- metadata


@dataclass(frozen=True, kw_only=True)
class SamplingMetadata:
    """The parameters of S rows of logits, on the host: those of logits i are in row `rows[i]` of `columns`."""

    columns: Mapping[str, NDArray[Any]]  # `gpu.sampling.columns.SAMPLING_COLUMNS` and maybe more, not to be written to
    rows: NDArray[np.int64]  # [S]
    positions: NDArray[np.int64]  # [S], positions of the tokens to sample, from the start of their prompts
    mask: LogitsMask | None = None  # of grammars
    bias: SparseBias | None = None
    penalties: Penalties | None = None

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column of these rows, [S]."""
        return self.columns[name][self.rows]

    @property
    def is_plain_greedy(self) -> bool:
        """True if each row only takes the token with its largest logit."""
        return (
            self.mask is None
            and self.bias is None
            and self.penalties is None
            and not self["temperature"].any()
            and bool((self["num_logprobs"] < 0).all())
        )

    def of_tokens(self, first: int, last: int) -> SamplingMetadata:
        """Return the metadata for logits of only the tokens `first` to `last`; `first` is a multiple of 8."""
        mask, bias, penalties = self.mask, self.bias, self.penalties
        if mask is not None:
            mask = replace(mask, bits=mask.bits.view(np.uint8)[:, first // 8 : -(-last // 8)])
        if bias is not None:
            bias = bias.of_tokens(first, last)
        if penalties is not None:
            penalties = penalties.of_tokens(first, last)
        return replace(self, mask=mask, bias=bias, penalties=penalties)

    def drawing(self, indices: NDArray[np.int64]) -> SamplingMetadata:
        """Return the metadata to draw in these rows, after mask, bias and penalties are applied to their logits."""
        rows, positions = self.rows[indices], self.positions[indices]
        return replace(self, rows=rows, positions=positions, mask=None, bias=None, penalties=None)
