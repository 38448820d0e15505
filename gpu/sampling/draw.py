"""Greedy choice, counter-based noise, and the draw in numpy, which also works over ranks that each hold a part of the
vocabulary.

The draw is the reference for the C++ library's and replaces it where no build of the library runs. With several ranks,
all make the same calls and get the same tokens: they exchange the sums of all weights, the most likely tokens if there
are filters, and the weights that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.sampling.columns import FILTERS

CANDIDATES = 256  # tokens of each rank from which filters are decided; where they do not suffice, all tokens are used

Floats = NDArray[np.floating[Any]]
Gather = Callable[[Floats, Sequence[int]], Floats]


def draw(logits: NDArray[np.float32], *parameters: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw as a `gpu.sampling.sampler.Draw`, from logits of the whole vocabulary."""
    return Shards(0, [logits.shape[1]], lambda values, _: values, lambda hidden: hidden).draw(logits, *parameters)


class Shards:
    """Sampling on one rank, which has `sizes[rank]` of the vocabulary's tokens, after those of lower ranks."""

    def __init__(
        self, rank: int, sizes: Sequence[int], gather: Gather, own_logits: Callable[[Any], NDArray[np.float32]]
    ) -> None:
        """`gather` concatenates the columns of all ranks: [S, n of each], and every n -> [S, their sum]. `own_logits`
        computes [S, sizes[rank]] from hidden states."""
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
        """Choose as `gpu.sampling.draw.largest` does, from all ranks' logits."""
        rows = np.arange(len(logits))
        ids, _ = largest(logits)
        own = np.stack([logits[rows, ids].astype(np.float64), ids + self.first], axis=1)
        every = self._gather(own, [2] * len(self._sizes)).reshape(len(rows), -1, 2)
        best = every[rows, every[..., 0].argmax(-1)]  # NaN counts as largest; of equal ones the first has the lower ids
        return best[:, 1].astype(np.int64), np.isfinite(best[:, 0])

    def draw(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draw as a `gpu.sampling.sampler.Draw`, from all ranks' logits."""
        temperature, *filters, uniform = parameters
        rows = np.arange(len(logits))
        with np.errstate(invalid="ignore", over="ignore"):  # rows with NaN or infinity are found by their sums
            # The largest logit becomes 0, so that no temperature can make it overflow.
            scores = logits - self._each(logits.max(-1)).max(-1, keepdims=True).astype(np.float32)
            weights = np.exp(scores / temperature[:, None])
            probs = weights / self._each(weights.sum(-1, dtype=np.float64)).sum(-1, keepdims=True).astype(np.float32)
            filtered = np.flatnonzero(
                np.any([part != column.default for part, column in zip(filters, FILTERS, strict=True)], 0)
            )
            if len(filtered):
                levels = self._levels(probs[filtered], [part[filtered] for part in filters])
                probs[filtered] *= probs[filtered] >= levels[:, None]
            # In float64, because sums near 1 have no room in float32 for tokens of probability below 6e-8. The uniform
            # is at most 1 - 2**-53, so its product with the total rounds below the total, and the first sum above it
            # belongs to a token that is kept.
            cumulative = probs.cumsum(-1, dtype=np.float64)
            ends = self._each(cumulative[:, -1]).cumsum(-1)
            target = uniform * ends[:, -1]
            owner = (ends <= target[:, None]).sum(-1).clip(max=len(self._sizes) - 1)
            target -= np.where(owner > 0, ends[rows, owner - 1], 0.0)
        ids = np.array([np.searchsorted(*pair, side="right") for pair in zip(cumulative, target, strict=True)])
        found = self._each(ids.clip(max=logits.shape[1] - 1) + self.first)[rows, owner]
        return found.astype(np.int64), np.isfinite(ends[:, -1])

    def _levels(self, probs: NDArray[np.float32], filters: Sequence[NDArray[Any]]) -> Floats:
        """Return the lowest probability that each row keeps, [S]."""
        counts = [min(CANDIDATES, size) for size in self._sizes]
        count = counts[self.rank]
        candidates = -np.partition(-probs, count - 1)[:, :count] if count < probs.shape[1] else probs
        # A token that is not among the candidates is no more likely than its rank's least likely candidate.
        unseen = self._each(candidates.min(-1) if count < probs.shape[1] else np.zeros(len(probs))).max(-1)
        levels, is_known = cutoffs(self._gather(candidates, counts), *filters, unseen=unseen)
        unknown = np.flatnonzero(~is_known)
        if len(unknown):
            levels[unknown], _ = cutoffs(self.whole(probs[unknown]), *(part[unknown] for part in filters))
        return levels

    def _each(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Exchange one number of each rank: [S] -> [S, ranks]."""
        return self._gather(values.astype(np.float64)[:, None], [1] * len(self._sizes)).astype(np.float64, copy=False)


def cutoffs(
    probs: Floats,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    *,
    unseen: NDArray[np.float64] | float = 0.0,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the lowest probability that each row keeps, [S], and bool [S], True where that is certain.

    `probs` is [S, n]: the whole vocabulary, rows summing to 1, or the most probable tokens, where no other is more
    probable than `unseen` [S]. `top_k` (0 is off), `top_p` (1 is off) and `min_p` (0 is off) are [S]. The order is
    vLLM's: min-p first, then top-k, then top-p on the rest, renormalized.

    All three filters keep the most probable tokens down to some level, so the strictest level is their intersection.
    Tokens that tie with the last one kept are kept too: the choice among them would otherwise depend on the sorting.
    """
    rows, width = np.arange(len(probs)), probs.shape[1]
    values = -np.sort(-probs, axis=-1)
    mass = values.cumsum(-1, dtype=np.float64)

    # min-p and top-k first: the level of both together, `floor`, and how many tokens reach it.
    kth = np.where((top_k == 0) | (top_k > width), 0.0, values[rows, top_k.clip(1, width) - 1])
    floor = np.maximum(kth, values[:, 0] * min_p).astype(values.dtype)
    num_kept = (values >= floor[:, None]).sum(-1).clip(min=1)
    unlimited = (floor == 0) & (top_k == 0)

    # top-p: the shortest run of tokens that holds its share of the mass above the floor.
    needed = top_p * np.where(unlimited, 1.0, mass[rows, num_kept - 1])
    last = np.minimum((mass < needed[:, None]).sum(-1), num_kept - 1)
    nucleus = values[rows, last]
    levels = np.where(top_p < 1.0, np.maximum(floor, nucleus), floor)

    # The floor itself is known if no unseen token exceeds it; the mass above it only if none ties with it either.
    by_mass = np.where(unlimited, (mass[:, -1] >= needed) & (nucleus >= unseen), floor > unseen)
    is_known = np.where(top_p < 1.0, by_mass, (top_k == 0) | (floor >= unseen))
    return levels, is_known | (np.asarray(unseen) == 0)


def largest(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for each row of [S, vocab] the index of the largest logit, the lowest of several, int64 [S]; and bool [S],
    False where the row holds NaN or +inf, or nothing but -inf. 64 rows of 49,152 take 0.2 ms."""
    indices = logits.argmax(-1)  # NaN counts as largest, so the largest shows whether the row is finite
    return indices, np.isfinite(logits[np.arange(len(logits)), indices])


# ---------------------------------------------------------------------------------------------------------------- noise
# Counter-based randomness: one uniform number for one token, a pure function of the request's seed and its position.
# There is no generator state, so a seed gives the same draws whatever else is in the batch, in whatever order, after a
# preemption and on another machine.


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: every multiple below 2**64 is distinct


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one float64 in [0, 1) for each pair, with 53 random bits."""
    return (random_bits(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_bits(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each pair: number `position` of the SplitMix64 sequence (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014) that starts at `mix(seed)`. The seed is mixed first
    so that neighbouring seeds do not walk through the same sequence one step apart.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 on purpose
        return _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
