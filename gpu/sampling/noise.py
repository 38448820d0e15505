"""Counter-based randomness: one uniform number for one token, a pure function of the request's seed and its position.

The sampler imports it. There is no generator to carry along, so a seed gives the same draws whatever else is in the
batch, in whatever order, after a preemption and on another machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.columns import Column

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: every multiple below 2**64 is distinct


def _seed(request: NewRequestData) -> int:
    if request.sampling.seed is None:
        raise ValueError(f"Request {request.request_id} has no seed: the engine draws one before it plans.")
    return request.sampling.seed & 2**64 - 1


SEED = Column("seed", np.uint64, 0, _seed)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One float64 in [0, 1) for each pair, with 53 random bits.

    It is number `position` of the SplitMix64 sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) whose state starts at `mix(seed)`. The seed is mixed first so that neighbouring seeds
    do not walk through the same sequence one step apart.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 on purpose
        bits = _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
