"""The angles of rotary position embedding (Su et al., arXiv:2104.09864), with the scalings of long-context checkpoints.

The C++ library (`gpu.cpu.decoder`) and torch (`gpu.models.layers`) make their tables from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelError, RopeScaling
from gpu.checkpoint.architecture import Rope

_POSITIONS_AT_ONCE = 2**16

Floats = NDArray[np.float32]


def rotations(max_positions: int, head_dim: int, rope: Rope) -> Iterator[tuple[slice, Floats, Floats]]:
    """Yield positions with the cosines and sines of their angles, [positions, head_dim / 2] each, multiplied by the
    scaling's factor; for pairs that do not rotate they are 1 and 0. They come in parts, because memory may not suffice
    for a second long table.

    Computed in float32 and rounded once by the caller: bfloat16 cannot distinguish positions above 256.
    """
    dim = head_dim if rope.dim is None else rope.dim
    of = head_dim if rope.proportional else dim
    inverse = inverse_frequencies(of, rope.theta, rope.scaling, max_positions)[: dim // 2]
    for start in range(0, max_positions, _POSITIONS_AT_ONCE):
        positions = slice(start, min(start + _POSITIONS_AT_ONCE, max_positions))
        angles = np.outer(np.arange(positions.start, positions.stop, dtype=np.float32), inverse)
        factor = np.float32(1.0 if rope.scaling is None else rope.scaling.attention_factor)
        others = np.ones((len(angles), (head_dim - dim) // 2), dtype=np.float32)
        yield positions, np.hstack((np.cos(angles) * factor, others)), np.hstack((np.sin(angles) * factor, 0 * others))


def query_scales(max_positions: int, scaling: RopeScaling | None) -> Floats | None:
    """Return the factor of queries at each position, float32 [max_positions]; None if it is always 1."""
    if scaling is None or not scaling.query_beta:
        return None
    turns = np.arange(max_positions, dtype=np.float32) // np.float32(scaling.original_max_position_embeddings)
    return np.float32(1) + np.float32(scaling.query_beta) * np.log(np.float32(1) + turns)


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None, max_positions: int = 0) -> Floats:
    """Return the radians per position of each of the pairs of `dim` dimensions, float32 [dim / 2], for contexts up to
    `max_positions`. Raises ModelError for an unknown `rope_type`."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(max(dim, 1))
    powers = np.float32(theta) ** exponents
    inverse: Floats = np.float32(1) / powers
    if scaling is None:
        return inverse
    if scaling.rope_type == "longrope":
        factors = scaling.long_factors if scaling.is_long(max_positions) else scaling.short_factors
        return (1 / (np.array(factors, dtype=np.float32) * powers)).astype(np.float32)
    if scaling.rope_type not in _SCALINGS:
        supported = ", ".join([*_SCALINGS, "longrope"])
        raise ModelError(f"RoPE scaling {scaling.rope_type!r} is not supported; supported are {supported}, or none.")
    return _SCALINGS[scaling.rope_type](inverse, scaling, theta)


def _scale_llama3(inverse: Floats, scaling: RopeScaling, _: float) -> Floats:
    """Llama 3.1: slow down pairs that turn less than `low_freq_factor` times in the original context, keep pairs that
    turn more than `high_freq_factor` times, and blend between. This is the formula of Meta's `apply_scaling`."""
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clip(0, 1)
    return ((1 - blend) * inverse / scaling.factor + blend * inverse).astype(np.float32)


def _scale_yarn(inverse: Floats, scaling: RopeScaling, theta: float) -> Floats:
    """YaRN (Peng et al., arXiv:2309.00071, 3.2): like Llama 3.1, but the blend is linear in the dimension, between the
    dimensions that turn `beta_fast` and `beta_slow` times in the original context."""
    dimensions = 2 * len(inverse)
    original = scaling.original_max_position_embeddings
    bounds = [
        dimensions * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dimensions - 1)
    if low == high:
        high += 0.001  # nothing in between, and no division by zero
    slowed = ((np.arange(len(inverse), dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    return (slowed * inverse / np.float32(scaling.factor) + (1 - slowed) * inverse).astype(np.float32)


_SCALINGS: dict[str, Callable[[Floats, RopeScaling, float], Floats]] = {
    # Position interpolation (Chen et al., arXiv:2306.15595).
    "linear": lambda inverse, scaling, _: inverse / np.float32(scaling.factor),
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
}
