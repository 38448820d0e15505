"""One token per row of logits, drawn without a sort, a softmax, a copy of the logits or a message to the host.

A token is drawn as the winner of a race: the largest of `logit / temperature - log(E)` over the vocabulary, with an
exponential variate E for each token, is distributed as the softmax of `logit / temperature`
(Gumbel, 1954). Filters only exclude runners, so nothing is normalized.

Three kernels draw. `_race` runs over all chunks of all rows: it finds the largest logit and the winner of each chunk.
A filter keeps the tokens with logits from some level up. If the winner of the whole row reaches it, it also wins among
the kept tokens, so the level need not be computed. For rows with top-p or min-p, `_weigh_above` sums the weights of the
tokens with larger logits than the winner. `_finish` has one program per row. It takes the winner if that sum is below
top-p; else it repeats the race, with the same noise, among the tokens with larger logits, until a winner passes.

In a flat row with top-k, the first winner rarely passes. So `_race` does not race rows with top-k: it keeps the maximum
of each group of 32 tokens. At least k tokens reach the k-th largest maximum, and all of them are in groups that reach
it. `_finish` copies these groups, finds which of their tokens the filters keep, and holds the race among those.

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
GROUP = 32  # tokens; of each group a row with top-k has the maximum
CAPACITY = 32768  # most tokens of a row that are copied: 1,024 groups, enough for a top-k of about 1,000


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
    chunk = min(CHUNK, triton.next_power_of_2(vocab_size))
    group = min(GROUP, chunk)
    num_chunks = triton.cdiv(vocab_size, chunk)
    results = torch.empty((num_rows, 7, num_chunks), dtype=torch.float32, device=device)
    tops = torch.empty((num_rows, num_chunks * chunk // group), dtype=logits.dtype, device=device)
    near = torch.empty((num_rows, CAPACITY), dtype=logits.dtype, device=device)
    places = torch.empty((num_rows, CAPACITY // group), dtype=torch.int32, device=device)
    parameters = [columns[name] for name in ("seed", "temperature", "top_k", "top_p", "min_p")]
    sizes = (logits.stride(0), vocab_size, num_chunks)
    inputs = (logits, positions, rows, *parameters, *sizes)
    shape = {"CHUNK": chunk, "BLOCK": triton.next_power_of_2(num_chunks)}
    race = {"FAST": isinstance(_race, triton.JITFunction), "GROUP": group}
    _race[(num_rows, num_chunks)](results, tops, *inputs, CHUNK=chunk, **race, num_warps=8)
    # Few programs: in most steps most rows need no weights, and even starting a program takes time.
    grid = (num_rows, min(num_chunks, max(8, 2048 // num_rows)))
    _weigh_above[grid](results, logits, rows, columns["min_p"], *sizes, **shape, num_warps=8)
    outputs = (token_ids, finite, results, tops, near, places)
    _finish[(num_rows,)](*outputs, *inputs, **shape, **race, CAPACITY=CAPACITY, num_warps=16)
    return token_ids, finite


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


# The kernels pass on seven numbers for each chunk of a row: its largest logit; the row's temperature (negative with
# top-k, 0 without filters); without top-k also its best score, its winner (exact: ids are below 2**24), the winner's
# logit; and with top-p or min-p its weights above the logit of the row's winner, and its weights that min-p keeps.


@triton.jit
def _race(
    results_ptr,
    tops_ptr,
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
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.load(rows_ptr + row)
    temperature = tl.load(temperature_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    by_count = (top_k > 0) & (top_k < vocab_size) & (temperature > 0)
    filtered = (tl.load(top_p_ptr + place) < 1.0) | (tl.load(min_p_ptr + place) > 0.0)
    token_id, x = _chunk(logits_ptr + row * logits_stride, chunk, tl.arange(0, CHUNK), vocab_size, num_chunks, CHUNK)
    target = results_ptr + row * 7 * num_chunks + chunk
    # A number that is not finite wins this maximum, whatever filters and noise say.
    tl.store(target, tl.max(tl.where(x == x, x, float("inf"))))
    tl.store(target + num_chunks, tl.where(by_count, -temperature, tl.where(filtered, temperature, 0.0)))
    if by_count:
        groups: tl.constexpr = CHUNK // GROUP
        group = (row * num_chunks + chunk) * groups + tl.arange(0, groups)
        tl.store(tops_ptr + group, tl.max(tl.reshape(x, (groups, GROUP)), 1))
        return
    score = tl.where(x == x, x, float("-inf"))
    if temperature > 0:
        score = _score(score, token_id, temperature, tl.load(seed_ptr + place), tl.load(positions_ptr + row), FAST)
    best, winner = _best(score, token_id, vocab_size)
    tl.store(target + 2 * num_chunks, best)
    tl.store(target + 3 * num_chunks, winner.to(tl.float32))
    if filtered:  # loaded again, because keeping all logits until here would take more registers in every program
        tl.store(target + 4 * num_chunks, tl.load(logits_ptr + row * logits_stride + winner).to(tl.float32))


@triton.jit
def _weigh_above(
    results_ptr,
    logits_ptr,
    rows_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    results_ptr += row * 7 * num_chunks
    temperature = tl.load(results_ptr + num_chunks)
    highest = tl.max(_of_chunks(results_ptr, 0, num_chunks, float("-inf"), BLOCK))
    if (temperature <= 0) | (highest == float("inf")) | (highest == float("-inf")):
        return
    winner = _winner(results_ptr, vocab_size, num_chunks, BLOCK)
    level = _level(winner, results_ptr, vocab_size, num_chunks, BLOCK)
    floor = _floor(highest, temperature, tl.load(min_p_ptr + tl.load(rows_ptr + row)))
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        tile = tl.arange(0, CHUNK)
        _all_ids, x = _chunk(logits_ptr + row * logits_stride, chunk, tile, vocab_size, num_chunks, CHUNK)
        weight = _weights(x, floor, highest, temperature, True)
        tl.store(results_ptr + 5 * num_chunks + chunk, tl.sum(tl.where(x > level, weight, 0.0)))
        tl.store(results_ptr + 6 * num_chunks + chunk, tl.sum(weight))


@triton.jit
def _finish(
    token_ids_ptr,
    finite_ptr,
    results_ptr,
    tops_ptr,
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
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    results_ptr += row * 7 * num_chunks
    highest = tl.max(_of_chunks(results_ptr, 0, num_chunks, float("-inf"), BLOCK))
    finite = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(finite_ptr + row, finite)
    temperature = tl.load(results_ptr + num_chunks)
    if (temperature != 0) & (not finite):
        tl.store(token_ids_ptr + row, tl.zeros([], tl.int64))
        return
    place = tl.load(rows_ptr + row)
    top_p = tl.load(top_p_ptr + place)
    min_p = tl.load(min_p_ptr + place)
    logits_ptr += row * logits_stride
    tile = tl.arange(0, CHUNK)

    if temperature >= 0:
        winner = _winner(results_ptr, vocab_size, num_chunks, BLOCK)
        if temperature > 0:
            level = _level(winner, results_ptr, vocab_size, num_chunks, BLOCK)
            floor = _floor(highest, temperature, min_p)
            above = tl.sum(_of_chunks(results_ptr, 5, num_chunks, 0.0, BLOCK))
            needed = top_p * tl.sum(_of_chunks(results_ptr, 6, num_chunks, 0.0, BLOCK))
            seed = tl.load(seed_ptr + place)
            position = tl.load(positions_ptr + row)
            while (level < floor) | ((top_p < 1.0) & (above >= needed) & (level < highest)):
                # Race again among tokens with larger logits. A chunk's winner with a larger one stays.
                pivot = level
                best = float("-inf")
                for chunk in range(num_chunks):
                    target = results_ptr + 2 * num_chunks + chunk
                    score = tl.load(target)
                    token = tl.load(target + num_chunks)
                    at = tl.load(target + 2 * num_chunks)
                    if (at <= pivot) | (at < floor):
                        token_id, x = _chunk(logits_ptr, chunk, tile, vocab_size, num_chunks, CHUNK)
                        scores = _score(x, token_id, temperature, seed, position, FAST)
                        scores = tl.where((x > pivot) & (x >= floor), scores, float("-inf"))
                        score, found = _best(scores, token_id, vocab_size)
                        token = found.to(tl.float32)
                        at = tl.load(logits_ptr + found).to(tl.float32)
                    wins = (score > best) | ((score == best) & (token < winner))  # the lowest of several
                    best = tl.where(wins, score, best)
                    winner = tl.where(wins, token, winner)
                    level = tl.where(wins, at, level)
                weight = tl.zeros([CHUNK], tl.float32)
                for start in range(0, vocab_size, CHUNK):
                    x = _load(logits_ptr, tile, vocab_size, start)
                    weight += tl.where(x > level, _weights(x, floor, highest, temperature, True), 0.0)
                above = tl.sum(weight)
        tl.store(token_ids_ptr + row, winner.to(tl.int64))
        return

    # Copy all groups that reach the k-th largest of the maxima, if they fit.
    temperature = -temperature
    floor = highest - 104.0 * temperature
    needed = tl.load(top_k_ptr + place).to(tl.float32)
    groups = num_chunks * (CHUNK // GROUP)
    tops_ptr += row * groups
    low = _search(tops_ptr, tile, groups, CHUNK, floor, highest, needed, highest, temperature, False)
    places_ptr += row * (CAPACITY // GROUP)
    near_ptr += row * CAPACITY
    count = 0
    PART: tl.constexpr = min(1024, CHUNK)
    part = tl.arange(0, PART)
    for start in range(0, groups, PART):
        chosen = (_load(tops_ptr, part, groups, start) >= low).to(tl.int32)
        at = count + tl.cumsum(chosen, 0) - 1
        tl.store(places_ptr + at, start + part, mask=(chosen > 0) & (at < CAPACITY // GROUP))
        count += tl.sum(chosen)
    tl.debug_barrier()
    copied = count <= CAPACITY // GROUP
    end = tl.where(copied, count * GROUP, vocab_size)
    values_ptr = logits_ptr
    if copied:
        for start in range(0, end, CHUNK):
            token_id = _copied_ids(places_ptr, start + tile, end, num_chunks, CHUNK, GROUP)
            x = tl.load(logits_ptr + token_id, mask=token_id < vocab_size, other=float("-inf"))
            tl.store(near_ptr + start + tile, x, mask=start + tile < end)
        tl.debug_barrier()
        values_ptr = near_ptr

    # min-p and top-k: the higher of the two levels. Then top-p, of what these leave.
    low = tl.where(copied, low, floor)
    level = _search(values_ptr, tile, end, CHUNK, low, highest, needed, highest, temperature, False)
    level = tl.maximum(level, _floor(highest, temperature, min_p))
    if top_p < 1.0:
        needed = top_p * _weigh(values_ptr, tile, end, CHUNK, level, highest, temperature, True)
        level = _search(values_ptr, tile, end, CHUNK, level, highest, needed, highest, temperature, True)
    seed = tl.load(seed_ptr + place)
    position = tl.load(positions_ptr + row)
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    winner = tl.zeros([CHUNK], tl.int32) + vocab_size
    for start in range(0, end, CHUNK):
        x = _load(values_ptr, tile, end, start)
        token_id = start + tile
        if copied:
            token_id = _copied_ids(places_ptr, token_id, end, num_chunks, CHUNK, GROUP)
        score = tl.where(x >= level, _score(x, token_id, temperature, seed, position, FAST), float("-inf"))
        wins = (score > best) | ((score == best) & (token_id < winner))
        best = tl.where(wins, score, best)
        winner = tl.where(wins, token_id, winner)
    _score_of_best, token = _best(best, winner, vocab_size)
    tl.store(token_ids_ptr + row, token.to(tl.int64))


@triton.jit
def _best(score, token_id, vocab_size):
    """Return the best score and its token; of several tokens with that score, the lowest id."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, token_id, vocab_size))


@triton.jit
def _winner(results_ptr, vocab_size, num_chunks, BLOCK: tl.constexpr):
    """Return the token id of a row's winner, as float32."""
    scores = _of_chunks(results_ptr, 2, num_chunks, float("-inf"), BLOCK)
    _score_of_best, winner = _best(scores, _of_chunks(results_ptr, 3, num_chunks, vocab_size, BLOCK), vocab_size)
    return winner


@triton.jit
def _level(winner, results_ptr, vocab_size, num_chunks, BLOCK: tl.constexpr):
    """Return the logit of a row's winner. Only rows with top-p or min-p have it."""
    logits = _of_chunks(results_ptr, 4, num_chunks, float("-inf"), BLOCK)
    return tl.max(tl.where(_of_chunks(results_ptr, 3, num_chunks, vocab_size, BLOCK) == winner, logits, float("-inf")))


@triton.jit
def _floor(highest, temperature, min_p):
    """Return the lowest logit that min-p keeps. Without min-p it is 104 temperatures below the highest logit, because
    exp(-104) is zero in float32."""
    return highest + temperature * tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), -104.0)


@triton.jit
def _copied_ids(places_ptr, index, end, num_chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Return the token ids of copied tokens, from their indices among a row's copies."""
    group = tl.load(places_ptr + index // GROUP, mask=index < end, other=0)
    places: tl.constexpr = CHUNK // GROUP
    return _token_ids(group // places, group % places * GROUP + index % GROUP, num_chunks, CHUNK)


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
# Only rows with top-k are searched: the copied groups, or the whole row if the groups do not fit. A search bisects
# between two logits. Each look moves both ends to logits that occur, so the search ends on one, after about as many
# looks as a logit has significant bits: ten for bfloat16. The order of sums does not depend on the rest of the batch.
# A search takes a pointer to `end` values, and `tile`, the indices of the first values.


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
def _load(values_ptr, tile, end, start):
    index = start + tile
    return tl.load(values_ptr + index, mask=index < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, level, highest, temperature, BY_MASS: tl.constexpr):
    """Return 1, or with BY_MASS exp((x - highest) / temperature), for values from `level` up, 0 for others."""
    return tl.where(x >= level, tl.exp((x - highest) / temperature) if BY_MASS else 1.0, 0.0)


@triton.jit
def _weigh(values_ptr, tile, end, STEP: tl.constexpr, level, highest, temperature, BY_MASS: tl.constexpr):
    weight = tl.zeros(tile.shape, tl.float32)
    for start in range(0, end, STEP):
        weight += _weights(_load(values_ptr, tile, end, start), level, highest, temperature, BY_MASS)
    return tl.sum(weight)


@triton.jit
def _search(values_ptr, tile, end, STEP: tl.constexpr, low, high, needed, highest, temperature, BY_MASS: tl.constexpr):
    """Return the largest value such that the values from it up weigh `needed`; else `low`. It is at most `high`."""
    looks = 0
    while (low < high) & (looks < 96):  # it ends long before; this only bounds what a NaN could do
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)  # adjacent floats have no number between them
        weight = tl.zeros(tile.shape, tl.float32)
        above = tl.full(tile.shape, float("inf"), tl.float32)
        below = tl.full(tile.shape, float("-inf"), tl.float32)
        for start in range(0, end, STEP):
            x = _load(values_ptr, tile, end, start)
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
