"""Greedy choice, counter-based noise, and sampling over ranks that each hold a part of the vocabulary.

With several ranks, all make the same calls and get the same tokens. A draw is that of `gpu.sampling.torch_draw`,
with the sum of all weights, the most likely tokens (if there are filters) and the weight of what is left put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.sampling.columns import FILTERS

CANDIDATES = 256  # of each rank, by which filters are decided; where these do not tell, all tokens are put together

Floats = NDArray[np.floating[Any]]
Gather = Callable[[Floats, Sequence[int]], Floats]


class Shards:
    """The tokens of one rank: `sizes[rank]` of them, behind those of the ranks before it."""

    def __init__(
        self, rank: int, sizes: Sequence[int], gather: Gather, own_logits: Callable[[Any], NDArray[np.float32]]
    ) -> None:
        """`gather` puts the columns of all ranks side by side: [S, n of each], and every n -> [S, their sum].
        `own_logits` of hidden states are [S, sizes[rank]]."""
        self.rank = rank
        self.own_logits = own_logits
        self.first = sum(sizes[:rank])
        self.last = self.first + sizes[rank]
        self._sizes = sizes
        self._gather = gather

    def whole(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """[S, own tokens] -> [S, vocab]"""
        return self._gather(logits, self._sizes).astype(np.float32, copy=False)

    def largest(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """As `gpu.sampling.draw.largest`, of all ranks' logits."""
        rows = np.arange(len(logits))
        ids, _ = largest(logits)
        own = np.stack([logits[rows, ids].astype(np.float64), ids + self.first], axis=1)
        every = self._gather(own, [2] * len(self._sizes)).reshape(len(rows), -1, 2)
        best = every[rows, every[..., 0].argmax(-1)]  # NaN counts as largest; of equal ones the first has the lower ids
        return best[:, 1].astype(np.int64), np.isfinite(best[:, 0])

    def draw(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A `gpu.sampling.sampler.Draw`, of all ranks' logits."""
        temperature, *filters, uniform = parameters
        rows = np.arange(len(logits))
        with np.errstate(invalid="ignore", over="ignore"):  # rows that are not sound are found by their sums
            scores = logits - self._each(logits.max(-1)).max(-1, keepdims=True).astype(np.float32)
            weights = np.exp(scores / temperature[:, None])
            probs = weights / self._each(weights.sum(-1, dtype=np.float64)).sum(-1, keepdims=True).astype(np.float32)
            filtered = np.flatnonzero(
                np.any([part != column.default for part, column in zip(filters, FILTERS, strict=True)], 0)
            )
            if len(filtered):
                levels = self._levels(probs[filtered], [part[filtered] for part in filters])
                probs[filtered] *= probs[filtered] >= levels[:, None]
            cumulative = probs.cumsum(-1, dtype=np.float64)
            ends = self._each(cumulative[:, -1]).cumsum(-1)
            target = uniform * ends[:, -1]
            owner = (ends <= target[:, None]).sum(-1).clip(max=len(self._sizes) - 1)
            target -= np.where(owner > 0, ends[rows, owner - 1], 0.0)
        ids = np.array([np.searchsorted(*pair, side="right") for pair in zip(cumulative, target, strict=True)])
        found = self._each(ids.clip(max=logits.shape[1] - 1) + self.first)[rows, owner]
        return found.astype(np.int64), np.isfinite(ends[:, -1])

    def _levels(self, probs: NDArray[np.float32], filters: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """The lowest probability that each row keeps, [S]."""
        counts = [min(CANDIDATES, size) for size in self._sizes]
        count = counts[self.rank]
        candidates = -np.partition(-probs, count - 1)[:, :count] if count < probs.shape[1] else probs
        levels = _cutoffs(self._gather(candidates, counts), filters)
        # What is not among the candidates is no larger than its rank's smallest one.
        unseen = self._each(candidates.min(-1) if count < probs.shape[1] else np.zeros(len(probs)))
        unknown = np.flatnonzero(levels <= unseen.max(-1))
        if len(unknown):
            levels[unknown] = _cutoffs(self.whole(probs[unknown]), [part[unknown] for part in filters])
        return levels

    def _each(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """One number of each rank, [S] -> [S, ranks]"""
        return self._gather(values.astype(np.float64)[:, None], [1] * len(self._sizes)).astype(np.float64, copy=False)


def _cutoffs(probs: Floats, filters: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    import torch

    from gpu.sampling.torch_draw import cutoffs

    levels: NDArray[np.float32] = cutoffs(
        torch.from_numpy(probs.astype(np.float32, copy=False)), *map(torch.from_numpy, filters)
    ).numpy()
    return levels


# ---------------------------------------------------------------------------------------------------------------- noise
# Counter-based randomness: one uniform number for one token, a pure function of the request's seed and its position.
#
# The sampler imports it. There is no generator to carry along, so a seed gives the same draws whatever else is in the
# batch, in whatever order, after a preemption and on another machine.


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: every multiple below 2**64 is distinct


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one float64 in [0, 1) for each pair, with 53 random bits."""
    return (random_bits(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_bits(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each pair: number `position` of the SplitMix64 sequence (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014) whose state starts at `mix(seed)`. The seed is mixed first
    so that neighbouring seeds do not walk through the same sequence one step apart.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 on purpose
        return _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --------------------------------------------------------------------------------------------------------------- greedy
# The largest logit of each row: 64 rows of 49,152 float32 take 0.2 ms. The sampler imports it.


def largest(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each row of [S, vocab]: int64 [S], the index of the largest logit and the lowest of several; and bool [S],
    False where the row holds NaN or +inf, or nothing but -inf."""
    indices = logits.argmax(-1)  # NaN counts as largest, so one look at the largest tells whether the row is sound
    return indices, np.isfinite(logits[np.arange(len(logits)), indices])
