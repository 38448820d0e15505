"""One token per row of logits, drawn without a sort, a softmax, a copy of the logits or a message to the host.

A token is drawn as the winner of a race: the largest of `logit / temperature - log(E)` over the vocabulary, with an
exponential variate E for each token, is distributed as the softmax of `logit / temperature`
(Gumbel, 1954). Filters only exclude runners, so nothing is normalized.

Promise: the same logits, parameters, seed and position give the same token, in any batch and any row. The sampler for
CPUs (`gpu.sampling.sampler`) inverts the cumulative distribution at one uniform number instead, which is cheaper there.
So a seed repeats itself on either kind of device, but gives other tokens on the other kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.kernels.dispatch import libdevice, on_triton, tl, triton
from gpu.sampling.columns import FILTERS
from gpu.sampling.draw import cutoffs, random_bits

CHUNK = 4096


def sample_tokens(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of `logits` ([S, vocab], contiguous, any float dtype; left as it is).

    `columns` are those of the row table on the device, [max_num_seqs] each: temperature, the filters, and seed. `rows`
    (int64 [S]) are indices into them, and `positions` (int64 [S]) those of the tokens to be drawn, counted from the
    start of the prompt.

    The order of the filters is vLLM's: min-p first, then top-k, then top-p on the rest, renormalized; tokens that tie
    with the last one kept are kept. A greedy row takes the largest logit, the lowest id of several.

    Returns int64 [S], always valid ids; and bool [S], False where a row holds NaN or +inf, or nothing but -inf, and its
    token means nothing.
    """
    if not on_triton(logits):
        return sample_tokens_reference(logits, columns, rows, positions)
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token_ids, finite
    levels = launch_cutoffs(logits, columns, rows)
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


def sample_tokens_reference(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the work of `sample_tokens` in torch."""
    logits = logits.float()
    temperature = columns["temperature"][rows].unsqueeze(1)
    drawn = temperature > 0
    scaled = torch.where(drawn, logits / temperature, logits)
    noise = exponential_noise(columns["seed"][rows], positions, logits.shape[1])
    scores = torch.where(drawn, scaled - noise.log(), scaled)
    level = cutoffs_reference(logits, columns, rows)
    scores = scores.masked_fill_(drawn & (logits < level.unsqueeze(1)), float("-inf"))
    highest = logits.amax(-1)  # NaN counts as highest
    return scores.nan_to_num(nan=float("-inf")).argmax(-1), highest.isfinite()


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
        else:  # no token of this chunk may win, so none needs noise
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


# ---------------------------------------------------------------------------------------------------------------- noise
# Counter-based noise: one exponential variate per token of the vocabulary, a pure function of the request's seed, the
# position of the token to be drawn, and the token id. A kernel makes it where it needs it; no tensor of it is stored.
#
# The 64 bits of a (seed, position) pair are those of `gpu.sampling.draw`. Their two halves key two rounds of a 32-bit
# finalizer with low bias (two multiplications and three xor-shifts, constants by C. Wellons' search) over the token id.


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard exponential variates, float32 [S, vocab_size], for int64 [S] seeds and positions."""
    keys = random_bits(seeds.cpu().numpy().view(np.uint64), positions.cpu().numpy())[:, None]
    token_ids = np.arange(vocab_size, dtype=np.uint32)
    bits = _finalize_reference(token_ids ^ keys.astype(np.uint32))
    bits = _finalize_reference(bits ^ (keys >> np.uint64(32)).astype(np.uint32))
    # -log(1 - v) for v in (0, 1). Small variates win the race, so v is exact there, and log1p has a series of its own.
    v = (torch.from_numpy(bits.astype(np.int64)).to(seeds.device).float() + 0.5) * 2.0**-32
    return -torch.log1p(-v.clamp(max=1.0 - 2.0**-24))


def _finalize_reference(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Permute 32-bit words; arithmetic is modulo 2**32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@triton.jit
def _noise(seed, position, token_id, FAST: tl.constexpr):
    """Return -log2(-log2(1 - v)) for one row, float32, the shape of `token_id`. `exponential_noise` is -log(1 - v): the
    two differ in a constant factor, which does not change the winner."""
    key = _mix(_mix(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = _finalize(_finalize(token_id.to(tl.uint32) ^ key.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # By its series where 1 - v would round v away. The fifth term is below a unit in the last place.
    series = v * (1.442695041 + v * (0.7213475204 + v * (0.480898347 + v * 0.3606737602)))
    return -_log2(tl.where(v < 0.015625, series, -_log2(1.0 - v, FAST)), FAST)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Return log2(x): one instruction when compiled, off by 2 ** -22 at most near 1; the interpreter lacks it."""
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


# -------------------------------------------------------------------------------------------------------------- cutoffs
# Top-k, top-p and min-p as the lowest logit that a row keeps, found by search instead of by sorting.
#
# One program per row. The tokens that matter are rarely more than a few hundred, so the logits within a few
# temperatures of the largest are first copied next to each other, and the searches run over the copy; the whole row is
# searched only where the copy does not suffice (a nucleus of thousands of tokens). A search bisects between two logits,
# and each look moves both ends to logits that occur, so it ends on one, after about as many looks as a logit has
# significant bits: ten for bfloat16. Sums are made in the same order whatever else is in the batch.


# How many logits are copied at most, and the length of a tile.
CAPACITY = 4096
# Logits within 16 temperatures of the largest (1e-7 of its probability) are tried first, then within half of it, ...
FIRST_REACH = 16.0
MAX_HALVINGS = 3
# exp(-104) is zero in float32: logits so many temperatures below the largest need not be distinguished.
NOTHING_BELOW = 104.0
MAX_LOOKS = 96  # bisection of float32 ends long before; this only bounds what a NaN could do


def launch_cutoffs(logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the lowest logit that each row keeps, float32 [S]; -inf where nothing is filtered."""
    num_rows, vocab_size = logits.shape
    capacity = min(CAPACITY, triton.next_power_of_2(vocab_size))
    levels = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    near = torch.empty((num_rows, capacity), dtype=torch.float32, device=logits.device)
    _cutoffs[(num_rows,)](
        levels,
        near,
        logits,
        rows,
        columns["temperature"],
        columns["top_k"],
        columns["top_p"],
        columns["min_p"],
        logits.stride(0),
        vocab_size,
        CAPACITY=capacity,
        FIRST_REACH=FIRST_REACH,
        MAX_HALVINGS=MAX_HALVINGS,
        NOTHING_BELOW=NOTHING_BELOW,
        MAX_LOOKS=MAX_LOOKS,
        num_warps=8,
    )
    return levels


def cutoffs_reference(logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the lowest logit that each row keeps, float32 [S], by `gpu.sampling.draw` in float64. Greedy rows keep
    all."""
    temperature = columns["temperature"][rows].double().unsqueeze(1)
    probs = (logits.double() / temperature.clamp(min=1e-30)).softmax(-1)
    filters = (columns[column.name][rows].cpu().numpy().astype(column.dtype) for column in FILTERS)
    levels, _ = cutoffs(probs.cpu().numpy(), *filters)
    kept = (probs >= torch.from_numpy(levels).to(probs.device).unsqueeze(1)) | (temperature == 0)
    return logits.masked_fill(~kept, float("inf")).amin(-1).float()


@triton.jit
def _cutoffs(
    levels_ptr,
    near_ptr,
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    FIRST_REACH: tl.constexpr,
    MAX_HALVINGS: tl.constexpr,
    NOTHING_BELOW: tl.constexpr,
    MAX_LOOKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_ptr + row)
    temperature = tl.load(temperature_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    min_p = tl.load(min_p_ptr + place)
    tl.store(levels_ptr + row, float("-inf"))
    if temperature == 0:
        return
    if (top_k == 0) & (top_p >= 1.0) & (min_p <= 0.0):
        return

    row_ptr = logits_ptr + row * logits_stride
    highest = _highest(row_ptr, vocab_size, CAPACITY)
    if (highest == float("inf")) | (highest == float("-inf")):  # no draw from this row means anything
        return
    bottom = highest - NOTHING_BELOW * temperature
    near_row_ptr = near_ptr + row * CAPACITY
    threshold = highest - FIRST_REACH * temperature
    num_near = _copy_from(near_row_ptr, row_ptr, vocab_size, threshold, CAPACITY)
    halvings = 0
    while (num_near > CAPACITY) & (halvings < MAX_HALVINGS):
        threshold = highest - (highest - threshold) * 0.5
        num_near = _copy_from(near_row_ptr, row_ptr, vocab_size, threshold, CAPACITY)
        halvings += 1
    tl.debug_barrier()  # the copies were made by other threads of this program
    copied = num_near <= CAPACITY

    # min-p, then top-k: the higher of the two levels.
    floor = bottom
    if min_p > 0:
        floor = tl.maximum(floor, highest + temperature * tl.log(min_p))
    if (top_k > 0) & (top_k < vocab_size):
        needed = top_k.to(tl.float32)
        if copied & (top_k <= num_near):
            kth = _search(near_row_ptr, num_near, threshold, highest, temperature, needed, False, CAPACITY, MAX_LOOKS)
        else:
            kth = _search(row_ptr, vocab_size, bottom, highest, temperature, needed, False, CAPACITY, MAX_LOOKS)
        floor = tl.maximum(floor, kth)

    # top-p, of what these leave.
    level = floor
    if top_p < 1.0:
        near_mass = 0.0
        if copied:
            near_mass = _mass(near_row_ptr, num_near, floor, highest, temperature, CAPACITY)
        if copied & (floor >= threshold):
            needed = top_p * near_mass
        else:
            needed = top_p * _mass(row_ptr, vocab_size, floor, highest, temperature, CAPACITY)
        if copied & (near_mass >= needed):
            low = tl.maximum(floor, threshold)
            level = _search(near_row_ptr, num_near, low, highest, temperature, needed, True, CAPACITY, MAX_LOOKS)
        else:
            level = _search(row_ptr, vocab_size, floor, highest, temperature, needed, True, CAPACITY, MAX_LOOKS)
    tl.store(levels_ptr + row, level)


@triton.jit
def _load(values_ptr, start, count, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    return tl.load(values_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _highest(values_ptr, count, BLOCK: tl.constexpr):
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, count, BLOCK):
        highest = tl.maximum(highest, _load(values_ptr, start, count, BLOCK))
    return tl.max(highest)


@triton.jit
def _copy_from(target_ptr, values_ptr, count, threshold, CAPACITY: tl.constexpr):
    """Copy the values from `threshold` up next to each other, up to CAPACITY; return how many such values exist."""
    found = count * 0
    for start in range(0, count, CAPACITY):
        x = _load(values_ptr, start, count, CAPACITY)
        chosen = (x >= threshold).to(tl.int32)
        place = found + tl.cumsum(chosen, 0) - 1
        tl.store(target_ptr + place, x, mask=(chosen > 0) & (place < CAPACITY))
        found += tl.sum(chosen)
    return found


@triton.jit
def _mass(values_ptr, count, level, highest, temperature, BLOCK: tl.constexpr):
    """Return the sum of exp((x - highest) / temperature) over the values from `level` up."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        x = _load(values_ptr, start, count, BLOCK)
        mass += tl.where(x >= level, tl.exp((x - highest) / temperature), 0.0)
    return tl.sum(mass)


@triton.jit
def _search(
    values_ptr,
    count,
    low,
    high,
    temperature,
    needed,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_LOOKS: tl.constexpr,
):
    """Return the largest value such that `needed` values, or with BY_MASS this mass, lie from it up; else `low`.

    It lies between `low` and `high`, the largest value of all.
    """
    highest = high
    looks = 0
    while (low < high) & (looks < MAX_LOOKS):
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)  # adjacent floats have no number between them
        weight = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, count, BLOCK):
            x = _load(values_ptr, start, count, BLOCK)
            reached = x >= middle
            if BY_MASS:
                weight += tl.where(reached, tl.exp((x - highest) / temperature), 0.0)
            else:
                weight += reached.to(tl.float32)
            above = tl.minimum(above, tl.where(reached, x, float("inf")))
            below = tl.maximum(below, tl.where(reached, float("-inf"), x))
        enough = tl.sum(weight) >= needed
        raised = tl.min(above)
        lowered = tl.maximum(tl.max(below), low)
        low = tl.where(enough, raised, low)
        high = tl.where(enough, high, lowered)
        looks += 1
    return low
