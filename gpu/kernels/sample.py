"""One token per row of logits, drawn without a sort, a softmax, a copy of the logits or a message to the host.

A token is drawn as the winner of a race: the largest of `logit / temperature - log(E)` over the vocabulary, with an
exponential variate E for each token, is distributed as the softmax of `logit / temperature`
(Gumbel, 1954). Filters only exclude runners, so nothing is normalized.

Three kernels draw. `_race` runs over all chunks of all rows: it finds the largest logit of each chunk and, in rows
without filters, its winner. `_gather_near` copies the most likely tokens of each chunk of a row with filters; it does
nothing in other rows. `_finish`, one program per row, finds the winner among the chunks' winners, or finds what the
filters keep of the copies and holds the race among that.

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
# How many tokens of a row are copied at most; more than the filters of nearly every row keep.
CAPACITY = 16384


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
    return launch(logits, columns, rows, positions)[:2]


def launch(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw by the kernels. Returns too the lowest logit that each row keeps, float32 [S]; -inf where all are kept."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    levels = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return token_ids, finite, levels
    chunk = min(CHUNK, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    block = triton.next_power_of_2(num_chunks)
    width = chunk // block
    slot = min(chunk, CAPACITY // num_chunks // width * width)
    results = torch.empty((num_rows, 5, num_chunks), dtype=torch.float32, device=device)
    near = torch.empty((num_rows, num_chunks, slot), dtype=logits.dtype, device=device)
    places = torch.empty(near.shape, dtype=torch.int16, device=device)
    parameters = [columns[name] for name in ("seed", "temperature", "top_k", "top_p", "min_p")]
    sizes = (logits.stride(0), vocab_size, num_chunks)
    inputs = (logits, positions, rows, *parameters, *sizes)
    grid, fast = (num_rows, num_chunks), isinstance(_race, triton.JITFunction)
    shape = {"CHUNK": chunk, "BLOCK": block, "SLOT": slot}
    _race[grid](results, *inputs, FAST=fast, CHUNK=chunk, num_warps=8)
    _gather_near[grid](results, near, places, logits, *sizes, **shape, num_warps=8)
    _finish[(num_rows,)](token_ids, finite, levels, results, near, places, *inputs, **shape, FAST=fast, num_warps=16)
    return token_ids, finite, levels


def sample_tokens_reference(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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


# The kernels hand on five numbers for each chunk of a row: its largest logit; the row's temperature if it has filters,
# else 0; then, without filters, its best score and winner (exact: token ids are below 2**24); with filters, the logit
# from which on all are copied, the mass of the chunk, and how many are copied.


@triton.jit
def _race(
    results_ptr,
    logits_ptr,
    positions_ptr,
    rows_ptr,
    seed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
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
    top_k = tl.load(top_k_ptr + place)
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (tl.load(top_p_ptr + place) < 1.0)
    filtered = (filtered | (tl.load(min_p_ptr + place) > 0.0)) & (temperature > 0)
    token_id, x = _chunk(logits_ptr + row * logits_stride, chunk, tl.arange(0, CHUNK), vocab_size, num_chunks, CHUNK)
    target = results_ptr + row * 5 * num_chunks + chunk
    # A number that is not finite wins this maximum, whatever filters and noise say.
    tl.store(target, tl.max(tl.where(x == x, x, float("inf"))))
    tl.store(target + num_chunks, tl.where(filtered, temperature, 0.0))
    if filtered:
        return
    score = tl.where(x == x, x, float("-inf"))
    if temperature > 0:
        score = _score(score, token_id, temperature, tl.load(seed_ptr + place), tl.load(positions_ptr + row), FAST)
    best = tl.max(score)
    tl.store(target + 2 * num_chunks, best)
    winner = tl.min(tl.where(score == best, token_id, vocab_size))  # the lowest of several
    tl.store(target + 3 * num_chunks, winner.to(tl.float32))


@triton.jit
def _gather_near(
    results_ptr,
    near_ptr,
    places_ptr,
    logits_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    results_ptr += row * 5 * num_chunks
    temperature = tl.load(results_ptr + num_chunks)
    highest = tl.max(_of_chunks(results_ptr, 0, num_chunks, float("-inf"), BLOCK))
    if (temperature == 0) | (highest == float("inf")) | (highest == float("-inf")):
        return
    logits_ptr += row * logits_stride
    _all_ids, x = _chunk(logits_ptr, chunk, tl.arange(0, CHUNK), vocab_size, num_chunks, CHUNK)
    # Tokens within 16 temperatures of the most likely one (1e-7 of its probability), or as many as fit.
    threshold = highest - 16.0 * temperature
    count = tl.sum((x >= threshold).to(tl.int32))
    if count > SLOT:
        low = threshold
        threshold = highest
        for _look in range(6):  # to a quarter of a temperature
            middle = low + (threshold - low) * 0.5
            reached = tl.sum((x >= middle).to(tl.int32))
            fits = reached <= SLOT
            low = tl.where(fits, low, middle)
            threshold = tl.where(fits, middle, threshold)
            count = tl.where(fits, reached, count)
        threshold = tl.where(count <= SLOT, threshold, float("inf"))  # too many are about as likely as the first
        count = tl.where(count <= SLOT, count, 0)
    target = results_ptr + 2 * num_chunks + chunk
    tl.store(target, threshold)
    tl.store(target + num_chunks, tl.sum(tl.exp((x - highest) / temperature)))
    tl.store(target + 2 * num_chunks, count.to(tl.float32))
    first = (row * num_chunks + chunk) * SLOT
    PART: tl.constexpr = min(1024, CHUNK)
    part = tl.arange(0, PART)
    found = 0
    for start in range(0, tl.where(count > 0, CHUNK, 0), PART):
        _part_ids, piece = _chunk(logits_ptr, chunk, start + part, vocab_size, num_chunks, CHUNK)
        chosen = (piece >= threshold).to(tl.int32)
        at = found + tl.cumsum(chosen, 0) - 1
        tl.store(near_ptr + first + at, piece, mask=chosen > 0)
        tl.store(places_ptr + first + at, (start + part).to(tl.int16), mask=chosen > 0)
        found += tl.sum(chosen)


@triton.jit
def _finish(
    token_ids_ptr,
    finite_ptr,
    levels_ptr,
    results_ptr,
    near_ptr,
    places_ptr,
    logits_ptr,
    positions_ptr,
    rows_ptr,
    seed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    FAST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    results_ptr += row * 5 * num_chunks
    highest = tl.max(_of_chunks(results_ptr, 0, num_chunks, float("-inf"), BLOCK))
    finite = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(finite_ptr + row, finite)
    tl.store(levels_ptr + row, float("-inf"))
    temperature = tl.load(results_ptr + num_chunks)
    if (temperature == 0) | (not finite):
        scores = _of_chunks(results_ptr, 2, num_chunks, float("-inf"), BLOCK)
        winners = _of_chunks(results_ptr, 3, num_chunks, vocab_size, BLOCK)
        winner = tl.min(tl.where(scores == tl.max(scores), winners, vocab_size))
        tl.store(token_ids_ptr + row, tl.where(temperature == 0, winner, 0.0).to(tl.int64))
        return

    # A tile with a row for each chunk, which moves along the copies; and one that moves along the whole row.
    WIDTH: tl.constexpr = CHUNK // BLOCK
    tile = tl.arange(0, CHUNK)
    chunk = tile // WIDTH
    count = tl.load(results_ptr + 4 * num_chunks + chunk, mask=chunk < num_chunks, other=0.0).to(tl.int32)
    longest = tl.max(count)
    near = chunk * SLOT + tile % WIDTH
    ends = chunk * SLOT + count
    near_ptr += row * num_chunks * SLOT
    places_ptr += row * num_chunks * SLOT
    logits_ptr += row * logits_stride
    threshold = tl.max(_of_chunks(results_ptr, 2, num_chunks, float("-inf"), BLOCK))  # all from here up are copied
    under = tl.minimum(threshold, highest)
    # exp(-104) is zero in float32: logits further below need not be distinguished.
    bottom = highest - 104.0 * temperature

    # min-p, then top-k: the higher of the two levels.
    place = tl.load(rows_ptr + row)
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    min_p = tl.load(min_p_ptr + place)
    floor = bottom
    if min_p > 0:
        floor = tl.maximum(floor, highest + temperature * tl.log(min_p))
    if (top_k > 0) & (top_k < vocab_size):
        needed = top_k.to(tl.float32)
        if _weigh(near_ptr, near, ends, longest, WIDTH, threshold, highest, temperature, False) >= needed:
            kth = _search(near_ptr, near, ends, longest, WIDTH, threshold, highest, needed, highest, temperature, False)
        else:
            kth = _search(
                logits_ptr, tile, vocab_size, vocab_size, CHUNK, bottom, under, needed, highest, temperature, False
            )
        floor = tl.maximum(floor, kth)

    # top-p, of what these leave.
    level = floor
    if top_p < 1.0:
        low = tl.maximum(floor, threshold)
        near_mass = _weigh(near_ptr, near, ends, longest, WIDTH, low, highest, temperature, True)
        if floor >= threshold:
            needed = top_p * near_mass
        elif floor == bottom:
            needed = top_p * tl.sum(_of_chunks(results_ptr, 3, num_chunks, 0.0, BLOCK))
        else:
            needed = top_p * _weigh(logits_ptr, tile, vocab_size, vocab_size, CHUNK, floor, highest, temperature, True)
        if near_mass >= needed:
            level = _search(near_ptr, near, ends, longest, WIDTH, low, highest, needed, highest, temperature, True)
        else:
            level = _search(
                logits_ptr, tile, vocab_size, vocab_size, CHUNK, floor, under, needed, highest, temperature, True
            )
    tl.store(levels_ptr + row, level)

    seed = tl.load(seed_ptr + place)
    position = tl.load(positions_ptr + row)
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    winner = tl.zeros([CHUNK], tl.int32) + vocab_size
    copied = level >= threshold
    step = tl.where(copied, WIDTH, CHUNK)
    for start in range(0, tl.where(copied, longest, vocab_size), step):
        if copied:
            x = _load(near_ptr, near, ends, start)
            at = tl.load(places_ptr + start + near, mask=start + near < ends, other=0).to(tl.int32)
            token_id = _token_ids(chunk, at, num_chunks, CHUNK)
        else:
            x = _load(logits_ptr, tile, vocab_size, start)
            token_id = tile + start
        score = tl.where(x >= level, _score(x, token_id, temperature, seed, position, FAST), float("-inf"))
        wins = (score > best) | ((score == best) & (token_id < winner))  # the lowest of several
        best = tl.where(wins, score, best)
        winner = tl.where(wins, token_id, winner)
    tl.store(token_ids_ptr + row, tl.min(tl.where(best == tl.max(best), winner, vocab_size)).to(tl.int64))


@triton.jit
def _token_ids(chunk, place, num_chunks, CHUNK: tl.constexpr):
    """Return the tokens at places of a chunk: every `num_chunks`-th run of 128. Likely tokens are neighbours, as most
    vocabularies begin with frequent words, but each chunk has the same room for copies."""
    RUN: tl.constexpr = min(128, CHUNK)
    return place // RUN * (num_chunks * RUN) + chunk * RUN + place % RUN


@triton.jit
def _chunk(row_ptr, chunk, place, vocab_size, num_chunks, CHUNK: tl.constexpr):
    token_id = _token_ids(chunk, place, num_chunks, CHUNK)
    return token_id, tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _of_chunks(results_ptr, number, num_chunks, other, BLOCK: tl.constexpr):
    chunk = tl.arange(0, BLOCK)
    return tl.load(results_ptr + number * num_chunks + chunk, mask=chunk < num_chunks, other=other)


@triton.jit
def _score(x, token_id, temperature, seed, position, FAST: tl.constexpr):
    # All in powers of two. A temperature that is nearly 0 must leave finite logits finite.
    return x * (1.4426950408889634 / tl.maximum(temperature, 1e-30)) + _noise(seed, position, token_id, FAST)


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
# The tokens that matter are rarely more than a few hundred, so the searches run over the copies of `_gather_near`; the
# whole row is searched only where these do not suffice (a nucleus of more than ten thousand tokens). A search bisects
# between two logits, and each look moves both ends to logits that occur, so it ends on one, after about as many looks
# as a logit has significant bits: ten for bfloat16. Sums are made in the same order whatever else is in the batch.
#
# Values to search are given as a tile of indices from a pointer on, the index where the values of each end, how far the
# tile moves in all, and how far at a step.


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
def _load(values_ptr, tile, ends, start):
    index = start + tile
    return tl.load(values_ptr + index, mask=index < ends, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, level, highest, temperature, BY_MASS: tl.constexpr):
    """Return 1, or with BY_MASS exp((x - highest) / temperature), for values from `level` up, 0 for others."""
    return tl.where(x >= level, tl.exp((x - highest) / temperature) if BY_MASS else 1.0, 0.0)


@triton.jit
def _weigh(values_ptr, tile, ends, end, STEP: tl.constexpr, level, highest, temperature, BY_MASS: tl.constexpr):
    weight = tl.zeros(tile.shape, tl.float32)
    for start in range(0, end, STEP):
        weight += _weights(_load(values_ptr, tile, ends, start), level, highest, temperature, BY_MASS)
    return tl.sum(weight)


@triton.jit
def _search(
    values_ptr, tile, ends, end, STEP: tl.constexpr, low, high, needed, highest, temperature, BY_MASS: tl.constexpr
):
    """Return the largest value such that the values from it up weigh `needed`; else `low`. It is at most `high`."""
    looks = 0
    while (low < high) & (looks < 96):  # it ends long before; this only bounds what a NaN could do
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)  # adjacent floats have no number between them
        weight = tl.zeros(tile.shape, tl.float32)
        above = tl.full(tile.shape, float("inf"), tl.float32)
        below = tl.full(tile.shape, float("-inf"), tl.float32)
        for start in range(0, end, STEP):
            x = _load(values_ptr, tile, ends, start)
            weight += _weights(x, middle, highest, temperature, BY_MASS)
            above = tl.minimum(above, tl.where(x >= middle, x, float("inf")))
            below = tl.maximum(below, tl.where(x >= middle, float("-inf"), x))
        enough = tl.sum(weight) >= needed
        raised = tl.min(above)
        lowered = tl.maximum(tl.max(below), low)
        low = tl.where(enough, raised, low)
        high = tl.where(enough, high, lowered)
        looks += 1
    return low
