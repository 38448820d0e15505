"""Top-k, top-p and min-p as the lowest logit that a row keeps, found by search instead of by sorting.

One program per row. What can matter is rarely more than a few hundred tokens, so those within a few temperatures of the
largest logit are first copied next to each other, and the searches run over them; only where they do not suffice (a
nucleus of thousands of tokens) over the whole row. A search bisects between two logits, and after each look both ends
move to values that occur, so it ends on one, after as many looks as there are bits in what distinguishes them: about
ten for bfloat16. Sums are made in one order whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

# How many logits are copied at most, and the length of a tile.
CAPACITY = 4096
# Those within 16 temperatures (a probability of 1e-7 of the largest) are tried first, then within half of it, ...
FIRST_REACH = 16.0
MAX_HALVINGS = 3
# exp(-104) is zero in float32: logits so many temperatures below the largest need not be told apart.
NOTHING_BELOW = 104.0
MAX_LOOKS = 96  # bisection of float32 ends long before; this only bounds what a NaN could do


def cutoffs(logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The lowest logit that each row keeps, float32 [S]; -inf where nothing is filtered."""
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
    """Copy the values from `threshold` up next to each other, as many as there is room for; returns how many there
    are."""
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
    """The sum of exp((x - highest) / temperature) over the values from `level` up."""
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
    """The largest value such that it and all above it together number `needed`, or weigh it; `low` if none does.

    It lies between `low` and `high`, the largest value there is.
    """
    highest = high
    looks = 0
    while (low < high) & (looks < MAX_LOOKS):
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)  # between neighbours there is nothing
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
