"""The table of step costs, and the work and budgets that follow from it.

A `StepLoad` describes a step. Its cost comes from three curves over numbers of tokens, each piecewise linear between
powers of two, plus the cost of attention and sampling:

    decodes alone    decode(decodes)                 + decode_key * keys
    prefill alone    prefill(tokens)                 + prefill_key * keys + prefill_row * (prompts - 1)
    both             the decodes + mixed(tokens)     + prefill_key * keys + prefill_row * (prompts - 1),
                     and no less than the prefill alone

`mixed` is a separate curve of what prefill adds to decodes: a device that reads its weights once for both takes less
than the sum, a CPU that has two forms of a matrix product takes about the sum. Decodes and prefill have separate costs
per key, because a chunk reads a key once for many tokens.

All parts are at least 0 and never fall with more tokens, so neither does the sum. Updates scale parts and never add to
them, so that sizes without measures follow the measured ones.

A cost is a middle value. How far steps are from it is the spread: for each size a histogram of the logarithms of their
seconds over the cost, steps that other work delayed included. The simulator draws from it.

The EngineCore owns the table and updates it from the steps it makes. Other parts have copies, as JSON.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import msgspec

MAX_SIZES = 64  # of a curve
MAX_TOKENS = 2**31  # of a size
MAX_SECONDS = 1e9  # the highest cost accepted, so that sums and products of costs stay finite
KEYS_PER_TOKEN = 8192  # before the first measure: attention to so many keys costs as much as a token
_FEW_TOKENS = 16  # smaller sizes show the fixed cost of a step, not the cost of a token
_TOKENS_PER_STEP = 8  # before the first measure: a step's fixed cost, in tokens
SETTLED = 3  # measures; the least of them counts, because other work on the machine may delay one or two
# The bounds of the spread's bins, as natural logarithms of seconds over the cost; the outer bins have all beyond.
SPREAD_BOUNDS = (
    *(-1.0, -0.5, -0.3, -0.2, -0.12, -0.07, -0.03),
    *(0.0, 0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0),
)
_NUM_BINS = len(SPREAD_BOUNDS) - 1
_MOST_SPREAD = 1000  # steps of a size; at so many they are halved, so that old steps are forgotten


class StepLoad(NamedTuple):
    """The work of one step. A key counts once for each token that attends to it; a token attends to itself, too."""

    num_decodes: int = 0  # tokens at positions that may yield one: one per request, more if drafts are verified
    num_decode_keys: int = 0  # of all decodes together
    num_prefills: int = 0  # requests with a chunk of their prompt
    num_prefill_tokens: int = 0
    num_prefill_keys: int = 0


def chunk_keys(start: int, num_tokens: int) -> int:
    """Return the keys of a chunk of `num_tokens` tokens, the first of which is at position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class Spread(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The latest real steps of a size, counted by how many times their cost they took; empty without such steps. `load`
    and `cost` are the means of these steps, the cost as it was then, because the costs of the table move."""

    bins: list[int] = []
    load: list[float] = []  # the fields of a `StepLoad`
    cost: float = 0.0

    def __post_init__(self) -> None:
        lengths = (len(self.bins), len(self.load))
        if lengths != (0, 0) and (
            lengths != (_NUM_BINS, len(StepLoad._fields)) or not 0 < sum(self.bins) <= MAX_TOKENS
        ):
            raise ValueError(f"a spread has {_NUM_BINS} numbers of steps and the mean load of these steps")
        if min(0, self.cost, *self.bins, *self.load) < 0 or max(0, self.cost, *self.load) > 1e18:
            raise ValueError("the numbers of a spread are at least 0")

    def add(self, load: StepLoad, cost: float, log_ratio: float) -> None:
        """Count a step that took e^`log_ratio` times its cost."""
        bins, means = self.bins or [0] * _NUM_BINS, self.load or [0.0] * len(load)
        bins[min(max(bisect_right(SPREAD_BOUNDS, log_ratio) - 1, 0), _NUM_BINS - 1)] += 1
        total = sum(bins)
        self.cost += (cost - self.cost) / total
        self.load = [mean + (own - mean) / total for mean, own in zip(means, load, strict=True)]
        if total >= _MOST_SPREAD:  # half of each sum from the top: the tail keeps its share, but not a single step
            halves = [count // 2 for count in accumulate(reversed(bins), initial=0)]
            bins = [more - less for less, more in pairwise(halves)][::-1]
        self.bins = bins


class Curve(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds over numbers of tokens: ascending `sizes`, the `seconds` of each, which never fall, and how often each
    was measured. A curve without measures has only a shape, which the first measure scales. `spread` is that of
    each size; it is empty in tables of earlier versions."""

    sizes: list[int]
    seconds: list[float]
    counts: list[int] = []
    spread: list[Spread] = []

    def __post_init__(self) -> None:
        self.counts = self.counts or [SETTLED] * len(self.sizes)
        self.spread = self.spread or [Spread() for _ in self.sizes]
        if not 0 < len(self.sizes) == len(self.seconds) == len(self.counts) == len(self.spread) <= MAX_SIZES:
            raise ValueError(f"a curve has 1 to {MAX_SIZES} sizes, and for each seconds, a count and a spread")
        if any(a >= b for a, b in zip([0, *self.sizes], [*self.sizes, MAX_TOKENS + 1], strict=True)):
            raise ValueError(f"the sizes of a curve ascend, from 1 at least to {MAX_TOKENS} at most")
        if not all(map(_is_cost, self.seconds)) or self.seconds != sorted(self.seconds) or min(self.counts) < 0:
            raise ValueError(f"the seconds of a curve are at least 0, at most {MAX_SECONDS:g}, and never fall")

    @classmethod
    def unknown(cls, largest: int) -> Curve:
        """Return a curve without measures that reaches at least this size."""
        sizes = [2**power for power in range((max(largest, 1) - 1).bit_length() + 1)]
        return cls(sizes, [float(_TOKENS_PER_STEP + size) for size in sizes], [0] * len(sizes))

    @property
    def is_known(self) -> bool:
        return any(self.counts)

    @property
    def is_settled(self) -> bool:
        """Return True if there are enough measures to believe them."""
        return sum(self.counts) >= SETTLED

    def at(self, size: int) -> float:
        """Return the seconds for `size` tokens; 0 for no tokens, or if nothing was measured."""
        return self._at(size) if size > 0 and self.is_known else 0.0

    def _at(self, size: int) -> float:
        sizes, seconds = self.sizes, self.seconds
        upper = bisect_left(sizes, size)
        if upper == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if sizes[upper] == size or upper == 0:
            return seconds[upper]
        lower = upper - 1
        share = (size - sizes[lower]) / (sizes[upper] - sizes[lower])
        return seconds[lower] + share * (seconds[upper] - seconds[lower])

    @property
    def slope(self) -> float:
        """The seconds that each token adds, over the whole curve; infinity if too few larger sizes were measured."""
        if len(self.sizes) < 2 or sum(self.counts[bisect_left(self.sizes, _FEW_TOKENS) :]) < SETTLED:
            return math.inf
        return (self.seconds[-1] - self.seconds[0]) / (self.sizes[-1] - self.sizes[0])

    def nearest(self, size: int) -> int:
        """Return the index of the size nearest to this one."""
        upper = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        return upper - (upper > 0 and size - self.sizes[upper - 1] < self.sizes[upper] - size)

    def lift(self, least: float) -> None:
        """Raise all seconds to at least this: scaling could not change a 0."""
        self.seconds = [max(each, least) for each in self.seconds]

    def begin(self, size: int, seconds: float) -> None:
        """Take in the first measure: it scales the whole curve."""
        self.counts[self.nearest(size)] = 1
        factor = seconds / self._at(size)
        self.seconds = [each * factor for each in self.seconds]

    def settled(self) -> Curve:
        """Return a copy that counts only the sizes that were measured often enough to be believed."""
        counts = [count if count >= SETTLED else 0 for count in self.counts]
        return Curve(self.sizes[:], self.seconds[:], counts, deepcopy(self.spread))

    def share_out(self, size: int, decode_seconds: float) -> None:
        """Limit the other sizes by `size`, measured just now: larger ones to at most its cost in proportion.

        `k` steps of `size` tokens do the work of one step of `k * size` tokens, so the large step costs no more than
        the small ones together, each with `decode_seconds` for its decodes. Without this limit a larger size that was
        measured while the machine was busy would never be tried again.
        """
        step, here = self._at(size) + decode_seconds, bisect_left(self.sizes, size)
        for index, other in enumerate(self.sizes):
            limit = min if index >= here else max
            self.seconds[index] = limit(self.seconds[index], step * other / size - decode_seconds)
        self.seconds = list(accumulate(self.seconds, max))  # rounding may have broken the rising order

    def scale(self, size: int, log_factor: float, measured: Collection[int] = ()) -> None:
        """Multiply the seconds of `size` by e^`log_factor`; the points on both sides of it share the change.

        Points up to the next ones in `measured` (indices) are guesses and follow. All others move only as far as the
        rising order requires.
        """
        sizes, num_sizes = self.sizes, len(self.sizes)
        upper = min(bisect_left(sizes, size), num_sizes - 1)
        lower = upper if sizes[upper] <= size or upper == 0 else upper - 1
        share = 1.0 if lower == upper else (size - sizes[lower]) / (sizes[upper] - sizes[lower])
        norm = share * share + (1 - share) * (1 - share)
        above = math.exp(log_factor * share / norm)
        below = above if lower == upper else math.exp(log_factor * (1 - share) / norm)
        before = max((index for index in measured if index < lower), default=-1)
        after = min((index for index in measured if index > upper), default=num_sizes)
        seconds = self.seconds[:]
        seconds[before + 1 : upper] = [each * below for each in seconds[before + 1 : upper]]
        seconds[upper:after] = [each * above for each in seconds[upper:after]]
        if log_factor < 0.0:
            seconds[lower] = min(seconds[lower], seconds[upper])
        seconds[:lower] = [min(each, seconds[lower]) for each in seconds[:lower]]
        if after < num_sizes:
            most = max(seconds[after], seconds[upper])
            seconds[upper:after] = [min(each, most) for each in seconds[upper:after]]
        self.seconds = list(accumulate(seconds, max))


class StepCostTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The costs of the steps of one engine. Parts that were never measured cost nothing."""

    decode: Curve
    prefill: Curve
    mixed: Curve
    decode_key: float = 0.0
    prefill_key: float = 0.0
    prefill_row: float = 0.0  # for each prompt after the first
    measured_at: float = 0.0  # Unix time of the latest measure; 0 if it is not known
    machine_load: float | None = None  # the load average when the table was sent or saved last

    def __post_init__(self) -> None:
        if not all(map(_is_cost, (self.decode_key, self.prefill_key, self.prefill_row))):
            raise ValueError(f"decode_key, prefill_key and prefill_row must be between 0 and {MAX_SECONDS:g} seconds")
        if not 0.0 <= self.measured_at <= 1e11:
            raise ValueError("measured_at must be a Unix time between 0 and 1e11 seconds")

    @classmethod
    def unknown(cls, max_num_seqs: int, max_num_batched_tokens: int) -> StepCostTable:
        """Return the table of an engine that has made no step."""
        curves = (Curve.unknown(largest) for largest in (max_num_seqs, *(max_num_batched_tokens,) * 2))
        decode, prefill, mixed = curves
        return cls(decode=decode, prefill=prefill, mixed=mixed)

    @property
    def is_known(self) -> bool:
        """Return True if decode steps were measured often enough to publish the table."""
        return self.decode.is_settled

    @property
    def is_complete(self) -> bool:
        """True if both decode steps and steps with prefill were measured often enough."""
        return self.decode.is_settled and (self.prefill.is_settled or self.mixed.is_settled)

    @property
    def summary(self) -> str:
        """The costs of the smallest and the largest steps, for a log line."""
        decode, prefill = self.decode, self.prefill if self.prefill.is_known else self.mixed
        parts = [f"{size} decoding: {decode.at(size) * 1e3:,.1f} ms" for size in (decode.sizes[0], decode.sizes[-1])]
        size = prefill.sizes[-1]
        known = f"{size} prefill tokens: {prefill.at(size) * 1e3:,.1f} ms"
        parts.append(known if prefill.is_known else "prefill: not measured yet")
        keys = f"{self.decode_key * 1e9:,.0f} ns per key when decoding, {self.prefill_key * 1e9:,.0f} ns in prefill"
        return f"{', '.join(parts)}; attention: {keys}"

    @property
    def seconds_per_prefill_token(self) -> float:
        """The least seconds per token of a long prompt, without the fixed cost of a step; 0 if not measured.

        It is a lower bound, so that a request is refused only if its deadline certainly cannot be met.
        """
        slope = min(self.prefill.slope, self.mixed.slope)
        return 0.0 if slope == math.inf else slope

    @property
    def seconds_per_prompt_token(self) -> float:
        """The seconds per token of a long prompt, with its share of the fixed cost of a step; 0 if not measured."""
        curve = self.prefill if self.prefill.is_known else self.mixed
        measured = [size for size, count in zip(curve.sizes, curve.counts, strict=True) if count]
        return curve.at(measured[-1]) / measured[-1] if measured else 0.0

    def cost(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        decodes, decode_keys, prefills, tokens, keys = load
        seconds = self.decode.at(decodes) + self.decode_key * decode_keys
        if not tokens:
            return seconds
        more = self.prefill_key * keys + self.prefill_row * max(prefills - 1, 0)
        alone = self.prefill.at(tokens)
        if not decodes and self.prefill.is_known:
            return alone + more
        added = self.mixed.at(tokens) if self.mixed.is_known else alone
        return max(seconds + added, alone) + more

    def curve_of(self, load: StepLoad) -> tuple[Curve, int]:
        """Return the curve that knows how many steps were like this one, and the step's size on it."""
        if not load.num_prefill_tokens:
            return self.decode, load.num_decodes
        return (self.mixed if load.num_decodes else self.prefill), load.num_prefill_tokens

    def note(self, load: StepLoad, seconds: float) -> None:
        """Count in the spread that a step took `seconds`. A size that was measured too few times has no cost yet with
        which a step could be compared."""
        curve, size = self.curve_of(load)
        index, cost = curve.nearest(size), self.cost(load)
        if cost > 0.0 < seconds and curve.counts[index] >= SETTLED:
            curve.spread[index].add(load, cost, math.log(seconds) - math.log(cost))

    def times_of(self, other: StepCostTable) -> float:
        """Return this table's seconds divided by another's, at the size where they differ most among the sizes that
        both have measured; 1 if there is none."""
        times = 1.0
        for name in ("decode", "prefill"):
            own, others = getattr(self, name), getattr(other, name)
            for size in _measured(own) & _measured(others):
                ratio = max(own.at(size), 1e-9) / max(others.at(size), 1e-9)
                times = max(times, ratio, key=lambda each: abs(math.log(each)))
        return times

    def settled(self) -> Self:
        """Return a copy for the disk, without sizes that were measured too few times."""
        curves = {name: getattr(self, name).settled() for name in ("decode", "prefill", "mixed")}
        return msgspec.structs.replace(self, **curves)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the table that `to_json` encoded. Raises ValueError if `data` is not a table."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a table of step costs: {error}") from None


def _measured(curve: Curve) -> set[int]:
    return {size for size, count in zip(curve.sizes, curve.counts, strict=True) if count}


def _is_cost(seconds: float) -> bool:
    return 0.0 <= seconds <= MAX_SECONDS


# ---------------------------------------------------------------------------------------------------------- step budget
# The prefill budget of a step that also decodes, so that running streams keep their inter-token latency.
#
# If decoding alone takes most of the target, prefill may still double the step's time: streams slow down by a factor
# of two at most, and waiting requests make progress. (With a hard target, 32 users on two cores got half the tokens.)
#
# If decoding alone takes a small part of the target, steps at the target slow streams down by a large factor. So a
# fifth of a long step's time is for the streams: what its own decodes do not take of it, steps of decodes alone get,
# rounded up. If decoding alone takes `a`, the long step `T`, and `n` steps of decodes alone follow, then
# `T / 5 <= (n + 1) * a` and `n * a < T / 5`. So streams keep `(n + 1) * a / (T + n * a)`, at least a sixth of their
# speed, and prefill takes less than 1.2 times as long as without these steps.
#
# Owned by the EngineCore.


MIN_PREFILL_TOKENS = 8  # so that a prefill makes progress under any target
UNMEASURED_PREFILL_TOKENS = 64  # before the first measure
_FOR_STREAMS = 0.2  # the part of the time of a step of at least half the target
_MOST_ALONE = 16  # steps of decodes alone in a row, whatever the table says
_EXPLORED = 16  # one of so many steps gets an eighth more tokens, so that larger chunks are measured, too


class StepBudget:
    """Keeps steps with both decodes and prefill near `target_seconds`, by the estimates of `table`. `latest` is the
    latest answer of `prefill_tokens`, or `max_tokens`."""

    def __init__(self, table: StepCostTable, max_tokens: int, target_seconds: float) -> None:
        self.table = table
        self.latest = max_tokens
        self._max_tokens = max_tokens
        self._target = target_seconds
        self._asked = 0
        self._alone = self._per_token = 0.0  # seconds, by the latest call of `prefill_tokens`
        self._owed = 0.0  # seconds of decodes alone

    def prefill_tokens(self, decodes: StepLoad, start: int) -> int:
        """Return how many prefill tokens, from position `start` of a prompt, fit into a step with these decodes."""
        self.latest = self._fitting(decodes, start)
        return self.latest

    @property
    def leaves_out_prefill(self) -> bool:
        """True if the next step only decodes, because the streams have not had their part of the time."""
        return self._owed > 0.0

    def count(self, num_prefill_tokens: int) -> None:
        """Count a planned step."""
        alone, seconds = self._alone, self._alone + self._per_token * num_prefill_tokens
        self._per_token = 0.0  # a step without decodes asks for no budget, and owes nothing
        owed = _FOR_STREAMS * seconds if 2 * seconds >= self._target else 0.0
        self._owed = min(max(self._owed + owed - alone, 0.0), _MOST_ALONE * alone)

    def _fitting(self, decodes: StepLoad, start: int) -> int:
        table = self.table
        if not (table.mixed.is_known or table.prefill.is_known):
            return min(UNMEASURED_PREFILL_TOKENS, self._max_tokens)
        alone = table.cost(StepLoad(decodes.num_decodes, decodes.num_decode_keys))
        affordable = max(self._target - alone, alone)

        def added_cost(tokens: int) -> float:
            load = StepLoad(decodes.num_decodes, decodes.num_decode_keys, 1, tokens, chunk_keys(start, tokens))
            return table.cost(load) - alone

        fits, too_many = MIN_PREFILL_TOKENS, self._max_tokens + 1
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            if added_cost(tokens) <= affordable:
                fits = tokens
            else:
                too_many = tokens
        self._alone, self._per_token = alone, added_cost(fits) / fits
        self._asked += 1
        if not self._asked % _EXPLORED:
            fits += fits // 8
        return min(fits, self._max_tokens)


# -------------------------------------------------------------------------------------------------------- expected work
# Estimates the work of a request before the length of its answer is known: as long as the latest answers were.


_ANSWERS = 32  # each answer has a weight of 1/32 in the mean
_CHUNK = 128  # prefill tokens of the mixed step from which the price of a prompt token is taken


class Prices(NamedTuple):
    """The seconds that one engine spends on its requests."""

    prompt_token: float  # in a step that also decodes
    step: float  # a step that only decodes


class TypicalRequest:
    """The mean lengths, in tokens, of the latest requests that ended by themselves; 0 before the first."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0.0
        self.num_output_tokens = 0.0

    def learn(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request that ended by itself."""
        part = 1 / _ANSWERS if self.num_output_tokens else 1.0
        self.num_output_tokens += (max(num_output_tokens, 1) - self.num_output_tokens) * part
        self.num_prompt_tokens += (num_prompt_tokens - self.num_prompt_tokens) * part

    def part_of_answer(self, max_tokens: int | None) -> float:
        """Return the expected length of a choice limited to `max_tokens`, as a fraction of a typical answer."""
        return 1.0 if max_tokens is None else min(1.0, max_tokens / max(self.num_output_tokens, 1.0))

    def prices(self, costs: StepCostTable, num_rows: int) -> Prices:
        """Return the prices by these costs while `num_rows` requests like this one decode."""
        keys = int(num_rows * (self.num_prompt_tokens + self.num_output_tokens / 2))
        step = costs.cost(StepLoad(num_rows, keys))
        chunk_keys = int(_CHUNK * min(self.num_prompt_tokens, _CHUNK) / 2)
        chunk = costs.cost(StepLoad(num_rows, keys, 1, _CHUNK, chunk_keys)) - step
        return Prices(chunk / _CHUNK, step)
