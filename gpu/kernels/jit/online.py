"""What both attention kernels share: a tile of scores and values taken into a running softmax, and how they are capped.

The online softmax (Milakov and Gimelshein, arXiv:1805.02867) as FlashAttention uses it (Dao et al., arXiv:2205.14135),
with powers of two instead of e: the scores come scaled by log2(e), and exp2 is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def beginning(sink_ptrs, is_taken, HAS_SINKS: tl.constexpr):
    """The maximum and the sum of weights of M rows that have seen no key: with a sink, of that alone, where it
    `is_taken`."""
    highest = tl.full(sink_ptrs.shape, float("-inf"), tl.float32)
    total = tl.zeros(sink_ptrs.shape, tl.float32)
    if HAS_SINKS:
        highest = tl.load(sink_ptrs, mask=is_taken, other=float("-inf")) * 1.4426950409  # log2(e)
        total = tl.where(is_taken, 1.0, 0.0)
    return highest, total


@triton.jit
def accumulate(acc, highest, total, scores, value):
    """Take float32 `scores` [M, TILE], -inf where hidden, and `value` [TILE, D] into the running state of M rows:
    weighted sum [M, D], maximum [M] and sum of weights [M], all float32."""
    raised = tl.maximum(highest, tl.max(scores, 1))
    # A row may have seen nothing so far; then the maximum is no number to subtract.
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(highest - shift)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return acc, raised, total


@triton.jit
def capped(scores, softcap):
    """Scores s as softcap * tanh(s / softcap), both times log2(e): tanh(x) = 1 - 2 / (1 + e^2x)."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * 2.8853900818)))
