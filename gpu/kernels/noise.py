"""Counter-based noise: for every token of the vocabulary one exponential variate, a pure function of a request's seed,
the position of the token to be drawn, and the token id.

Imported by `sample`. Nothing is carried along, so a seed gives the same draws in any batch, after a preemption and on
any number of blocks; and no tensor of noise is ever stored, because a kernel makes it where it needs it.

The 64 bits of a (seed, position) pair are those of `gpu.sampling.draw`: SplitMix64 (Steele, Lea and Flood, OOPSLA
2014). Their two halves key two rounds of a 32-bit finalizer with low bias (two multiplications and three xor-shifts,
constants by C. Wellons' search) over the token id.
"""

from __future__ import annotations

import torch

_GOLDEN_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_MIX_1, _MIX_2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB
_LOW_32 = 0xFFFFFFFF


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard exponential variates, float32 [S, vocab_size], for int64 [S] seeds and positions."""
    keys = _mix(_mix(seeds) + (positions + 1) * _GOLDEN_GAMMA)
    low, high = (keys & _LOW_32).unsqueeze(1), ((keys >> 32) & _LOW_32).unsqueeze(1)
    token_ids = torch.arange(vocab_size, device=seeds.device)
    bits = _finalize(_finalize(token_ids ^ low) ^ high)
    # -log(1 - v) for v in (0, 1). Small variates win the race, so v is exact there, and log1p has a series of its own.
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-v)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer in int64, whose products wrap around as uint64's do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _finalize(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words, held in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)
