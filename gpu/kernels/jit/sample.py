"""Kernels of gpu.kernels.sample: the race over the vocabulary, in chunks, and the choice among the chunks' winners."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from gpu.kernels.jit.cutoff import cutoffs

CHUNK = 4096


def sample_tokens(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token_ids, finite
    levels = cutoffs(logits, columns, rows)
    chunk = min(CHUNK, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    scores = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    highest = torch.empty_like(scores)
    winners = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    _race[(num_rows, num_chunks)](
        scores,
        highest,
        winners,
        logits,
        levels,
        rows,
        positions,
        columns["temperature"],
        columns["seed"],
        logits.stride(0),
        vocab_size,
        num_chunks,
        FAST=isinstance(_race, triton.JITFunction),
        CHUNK=chunk,
        num_warps=8,
    )
    _finish[(num_rows,)](
        token_ids, finite, scores, highest, winners, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return token_ids, finite


@triton.jit
def _race(
    scores_ptr,
    highest_ptr,
    winners_ptr,
    logits_ptr,
    levels_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    FAST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.load(rows_ptr + row)
    temperature = tl.load(temperature_ptr + place)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token_id < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    # A number that is not finite wins this maximum, whatever filters and noise say.
    highest = tl.max(tl.where(x == x, x, float("inf")))
    score = tl.where(x == x, x, float("-inf"))
    if temperature > 0:
        level = tl.load(levels_ptr + row)
        if highest >= level:
            # All in powers of two. A temperature that is nearly 0 must leave finite logits finite.
            inverse = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
            noise = _noise(tl.load(seed_ptr + place), tl.load(positions_ptr + row), token_id, FAST)
            score = tl.where(x >= level, score * inverse + noise, float("-inf"))
        else:  # nobody here may win, and nobody needs noise
            score = tl.full([CHUNK], float("-inf"), tl.float32)
    best = tl.max(score)
    target = row * num_chunks + chunk
    tl.store(scores_ptr + target, best)
    tl.store(highest_ptr + target, highest)
    tl.store(winners_ptr + target, tl.min(tl.where(score == best, token_id, vocab_size)))  # the lowest of several


@triton.jit
def _finish(token_ids_ptr, finite_ptr, scores_ptr, highest_ptr, winners_ptr, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    source = row * num_chunks + chunk
    best = tl.argmax(tl.load(scores_ptr + source, mask=inside, other=float("-inf")), 0)
    highest = tl.max(tl.load(highest_ptr + source, mask=inside, other=float("-inf")))
    tl.store(token_ids_ptr + row, tl.load(winners_ptr + row * num_chunks + best).to(tl.int64))
    tl.store(finite_ptr + row, (highest > float("-inf")) & (highest < float("inf")))


@triton.jit
def _noise(seed, position, token_id, FAST: tl.constexpr):
    """-log2(-log2(1 - v)) for one row, where `gpu.kernels.noise.exponential_noise` is -log(1 - v): float32, the shape
    of `token_id`. The two differ in a factor, which is a constant that decides no race."""
    key = _mix(_mix(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = _finalize(_finalize(token_id.to(tl.uint32) ^ key.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # By its series where 1 - v would round v away. The fifth term is below a unit in the last place.
    series = v * (1.442695041 + v * (0.7213475204 + v * (0.480898347 + v * 0.3606737602)))
    return -_log2(tl.where(v < 0.015625, series, -_log2(1.0 - v, FAST)), FAST)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """One instruction where it is compiled, off by 2 ** -22 at most near 1; the interpreter has no such thing."""
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
