"""Measurement of step costs while the engine is idle, and their update by real steps.

Each call makes one step, so a request that arrives waits for one step at most. All steps together take `MAX_SECONDS`:
the most informative shapes come first, three times each. Once three measures allow an estimate, a shape that is
likely to take more than the remaining time is skipped. If the thread lost its processor during a step, or the step took
more than three times its estimate, its time is discarded and it is repeated; repeats may take another `MAX_SECONDS`.
The result is a `StepCostTable`; rows and blocks are freed after every step. Owned by the EngineCore.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from typing import Literal, NamedTuple

from engine.config import Clock, EngineConfig
from engine.costs.table import KEYS_PER_TOKEN, SETTLED, Curve, StepCostTable, StepLoad, chunk_keys
from engine.executor import ComputesHere, Executor
from engine.messages import SamplingParams
from engine.plan import NewRequestData, SchedulerOutput
from engine.scheduler.block_pool import BlockPool

MADE_UP = "calibration-"  # prefix of the ids of made-up requests
MAX_SECONDS = 2.0
SHORT, LONG = 16, 512  # tokens of context
_PROBED = 128  # tokens of the chunk by which the costs per key and per prompt are measured
_SAMPLING = SamplingParams(temperature=0.7, seed=0)


class Shape(NamedTuple):
    """A made-up step: it decodes `decodes` streams with `context` tokens of context each, and computes `tokens` tokens,
    from position `start`, of each of `prompts` prompts."""

    decodes: int = 0
    context: int = SHORT
    prompts: int = 0
    tokens: int = 0
    start: int = 0

    @property
    def load(self) -> StepLoad:
        keys = self.prompts * chunk_keys(self.start, self.tokens)
        return StepLoad(self.decodes, self.decodes * self.context, self.prompts, self.prompts * self.tokens, keys)


class Calibration:
    """The measuring steps that are still to be made. `seconds` is the time that the finished steps took."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        pool: BlockPool,
        tracker: StepCostTracker,
        lost_time: LostTime,
        clock: Clock,
    ) -> None:
        self.seconds = 0.0
        self._executor = executor
        self._pool = pool
        self._tracker = tracker
        self._lost_time = lost_time
        self._lost = 0.0  # seconds of steps that are repeated
        self._again: Counter[Shape] = Counter()
        self._clock = clock
        self._num_groups = len(config.facts.kv_windows)
        self._length = min(LONG, config.max_model_len - 1)
        self._samples: defaultdict[Shape, list[float]] = defaultdict(list)
        self._rows = min(8, config.max_num_seqs)
        self._chunk = min(_PROBED, config.max_num_batched_tokens // 2, self._length // 2)
        # These differ from `Shape(rows)` and `Shape(prompts=1, tokens=chunk)` only in their number of keys or prompts.
        self._with_keys = Shape(self._rows, context=self._length)
        self._with_more_keys = Shape(prompts=1, tokens=self._chunk, start=self._length - self._chunk)
        self._with_prompts = Shape(prompts=self._rows, tokens=max(self._chunk // self._rows, 1))
        self._left = deque(self._shapes(config))
        self._first = self._left[0]

    def _shapes(self, config: EngineConfig) -> list[Shape]:
        rows, most = config.max_num_seqs, min(config.max_num_batched_tokens, self._length)
        first = [Shape(1), Shape(prompts=1, tokens=min(64, most)), Shape(rows), Shape(prompts=1, tokens=most)]
        first += [Shape(self._rows), Shape(self._rows, prompts=1, tokens=self._chunk), Shape(prompts=1, tokens=16)]
        first += [Shape(prompts=1, tokens=self._chunk), self._with_keys, self._with_more_keys, self._with_prompts]
        sizes = [2**power for power in range(1, 20)]
        others = [Shape(size) for size in sizes if size < rows]
        others += [Shape(prompts=1, tokens=size) for size in sizes if 16 < size < most]
        others += [Shape(1, prompts=1, tokens=size) for size in sizes if 16 <= size < most]
        shapes = [each for each in dict.fromkeys(first + others) if self._fits(each, config)]
        # The first two shapes give the estimates of the others, so they are measured SETTLED times before any other. No
        # shape is measured three times in a row: if other work delays a step, it may delay the next one, too.
        groups = [shapes[:2], shapes[2:8], *(shapes[first : first + 8] for first in range(8, len(shapes), 8))]
        return [shape for group in groups for shape in SETTLED * group]

    @staticmethod
    def _fits(shape: Shape, config: EngineConfig) -> bool:
        num_tokens = shape.decodes + shape.prompts * shape.tokens
        return (
            0 < num_tokens <= config.max_num_batched_tokens
            and shape.decodes + shape.prompts <= config.max_num_seqs
            and max(shape.context, shape.start + shape.tokens) < config.max_model_len
        )

    def step(self) -> bool:
        """Make one step, and return True if more are left. Raises what the executor raises."""
        while self._left:
            shape = self._left.popleft()
            expected = self._estimate(shape)
            if shape != self._first and self.seconds - self._lost + expected > MAX_SECONDS:
                continue
            self._lost_time.begin()
            took = self._measure(shape)
            self.seconds += took
            was_held_up = self._lost_time.was_held_up(took)
            is_odd = was_held_up or 0.0 < 3 * expected < took
            if is_odd and self._lost < MAX_SECONDS and self._again[shape] < SETTLED:
                self._lost += took
                self._again[shape] += 1
                self._left.appendleft(shape)
                return True
            samples = self._samples[shape]
            samples.append(took)
            if len(samples) == SETTLED and shape.start == 0 and shape.prompts < 2 and shape.context == SHORT:
                for _ in samples:
                    self._tracker.observe(shape.load, min(samples))
            return True
        self._set_rates()
        return False

    def _estimate(self, shape: Shape) -> float:
        """Return the expected seconds of a step; 0 while there are too few measures."""
        table = self._tracker.table
        is_settled = table.prefill.is_settled if shape.prompts else table.decode.is_settled
        return table.cost(shape.load) if is_settled else 0.0

    def _measure(self, shape: Shape) -> float:
        requests, names = [], []
        prompt = shape.start + shape.tokens
        longest = max(shape.context if shape.decodes else 0, prompt)
        count = min(-(-longest // self._executor.block_size) * self._num_groups, self._pool.num_free)
        scratch = self._pool.allocate(count)
        try:
            for number in range(shape.decodes + shape.prompts):
                is_decode = number < shape.decodes
                length, computed = (shape.context, shape.context - 1) if is_decode else (prompt, shape.start)
                names.append(f"{MADE_UP}{number}")
                requests.append(self._request(names[-1], length, computed, is_decode, scratch))
            tokens = [1] * shape.decodes + [shape.tokens] * shape.prompts
            plan = SchedulerOutput.made_up([], requests, names, tokens, [1] * len(names))
            began = self._clock()
            try:
                self._executor.submit(plan).result()
                return self._clock() - began
            finally:
                self._executor.submit(SchedulerOutput.made_up(names, [], [], [], [])).result()
        finally:
            self._pool.release(scratch)

    def _request(self, name: str, length: int, computed: int, is_decode: bool, scratch: list[int]) -> NewRequestData:
        places = -(-length // self._executor.block_size) * self._num_groups
        return NewRequestData(
            request_id=name,
            token_ids=[(7919 * position + 1) % self._executor.vocab_size for position in range(length)],
            num_prompt_tokens=computed if is_decode else length,
            num_computed_tokens=computed,
            block_ids=[scratch[place % len(scratch)] for place in range(places)],
            sampling=_SAMPLING,
            stop_token_ids=[],
        )

    def _set_rates(self) -> None:
        """Set the costs per key and per prompt, from pairs of steps that differ only in keys or only in prompts."""
        table, length, chunk = self._tracker.table, self._length, self._chunk
        took = {shape: min(samples) for shape, samples in self._samples.items() if len(samples) >= SETTLED}
        plain = Shape(prompts=1, tokens=chunk)
        for more, less, number, rate in (
            (self._with_keys, Shape(self._rows), self._rows * (length - SHORT), "decode_key"),
            (self._with_more_keys, plain, chunk * (length - chunk), "prefill_key"),
            (self._with_prompts, plain, self._rows - 1, "prefill_row"),
        ):
            if more in took and less in took and number > 0:
                least = took[less] / 1000  # above 0, so that scaling can still correct it
                setattr(table, rate, max(took[more] - took[less], least) / number)


# --------------------------------------------------------------------------------------------------------- cost tracker
# Updates a `StepCostTable` from the steps that the engine makes.
#
# A single step may have been delayed by other work on the machine. So the stated cost of a size changes only when its
# three latest steps were all slower than stated, or all quicker, and then by the smallest difference. A single step
# that took a hundred times as long changes nothing; the table follows a machine that has become slower within a few
# steps; and where steps vary, it states a middle value. A single quicker step is enough for a size measured fewer than
# three times, in all or by this tracker: other work can only make a step slower.
#
# The cost of a size that was not measured lately follows its neighbours, because it may come from another process or
# from a time when the machine was busy. If one of two sizes was measured just now, the larger one costs at most its
# share of the smaller one (`Curve.share_out`); otherwise pacing would never try it again.
#
# A step has one time but several parts: a difference is divided among them in proportion to what they contribute. The
# cost of decodes is learned from steps without prefill; a mixed step can only lower it, to at most its whole time.
#
# Owned by the EngineCore.


_LATELY = 64  # the latest measures of a curve that count as recent
_LEAST_SECONDS = 1e-9  # the least time of a step
_MOST = 7.0  # largest natural logarithm of one change: about a factor of 1000
_LEAST = 0.005  # smallest one: a change of half a percent is not worth its own cost
# Every step has tokens, but only some have many keys. So keys get this many times their share of a difference.
_KEYS_BLAME = 4

Rate = Literal["decode_key", "prefill_key"]


class _Measures:
    """The measures of one curve since this process began, by the index of the size."""

    def __init__(self) -> None:
        self.latest: deque[int] = deque(maxlen=_LATELY)
        self.counts: Counter[int] = Counter()
        self.ratios: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # ln of the last two

    def count(self, index: int) -> None:
        self.latest.append(index)
        self.counts[index] += 1


class StepCostTracker:
    """Updates `table` by what steps took. `changes` says how much it has changed: the sum of |log(new / old)|."""

    def __init__(self, table: StepCostTable) -> None:
        self.table = table
        self.changes = 0.0
        curves = (table.decode, table.prefill, table.mixed)
        self._measures = {id(curve): _Measures() for curve in curves}
        for curve in curves:
            curve.lift(_LEAST_SECONDS)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step of this load, which began `seconds` before the next step."""
        table, seconds = self.table, max(seconds, _LEAST_SECONDS)
        decodes, decode_keys, prefills, tokens, keys = load
        prompts = max(prefills - 1, 0)
        if not tokens:
            if decodes:
                self._learn(table.decode, decodes, seconds, "decode_key", decode_keys)
            return
        if not decodes or (table.prefill.is_known and seconds < table.prefill.at(tokens)):
            self._learn(table.prefill, tokens, seconds, "prefill_key", keys, prompts)
        if decodes:
            alone = table.cost(StepLoad(decodes, decode_keys))
            if seconds <= alone and table.mixed.is_known:  # the stated time of the decodes is out of date
                self._learn(table.decode, decodes, seconds, "decode_key", decode_keys)
                alone = min(table.cost(StepLoad(decodes, decode_keys)), seconds)
            added = max(seconds - alone, 0.1 * seconds)
            self._learn(table.mixed, tokens, added, "prefill_key", keys, prompts, alone)

    def _learn(
        self, curve: Curve, size: int, seconds: float, rate: Rate, keys: int, prompts: int = 0, decodes: float = 0.0
    ) -> None:
        """Learn that this part of a step took `seconds`, in addition to the seconds of its `decodes`."""
        table, index, per_key = self.table, curve.nearest(size), getattr(self.table, rate)
        if not curve.is_known:
            curve.begin(size, seconds)
            self._measures[id(curve)].count(index)
            if not per_key:
                setattr(table, rate, seconds / size / KEYS_PER_TOKEN)
            return
        own, of_keys, of_prompts = curve.at(size), per_key * keys, table.prefill_row * prompts
        stated = own + of_keys + of_prompts
        log_ratio = max(-_MOST, min(math.log(seconds / stated), _MOST))
        if change := self._change(curve, index, log_ratio):
            share = change * stated / (own * own + _KEYS_BLAME * of_keys * of_keys + of_prompts * of_prompts)
            curve.scale(size, share * own, self._measures[id(curve)].latest)
            setattr(table, rate, per_key * math.exp(share * _KEYS_BLAME * of_keys))
            table.prefill_row *= math.exp(share * of_prompts)
        if log_ratio <= change:  # the step took no longer than the table says now
            curve.share_out(size, decodes)

    def _change(self, curve: Curve, index: int, log_ratio: float) -> float:
        """Count a measure, and return the natural logarithm of the factor by which the stated seconds change."""
        measures, count = self._measures[id(curve)], curve.counts[index]
        curve.counts[index] = count + 1
        measures.count(index)
        older, old = measures.ratios[index]
        change = max(min(older, old, log_ratio), 0.0) + min(max(older, old, log_ratio), 0.0)
        if not count or (min(count, measures.counts[index] - 1) < SETTLED and log_ratio < 0.0):
            change = log_ratio
        elif -_LEAST <= change <= _LEAST:
            change = 0.0
        measures.ratios[index] = old - change, log_ratio - change
        self.changes += abs(change)
        return change


# ------------------------------------------------------------------------------------------------------------ lost time
# Detects steps that other work on the machine delayed: their times do not show what a step costs.
#
# It works for executors that compute in the calling thread, by that thread's CPU time: if a step took much longer than
# its thread computed, the thread waited for a processor, or for a helper thread that waited for one. It detects nothing
# if a device or other processes compute, because the thread waits for them anyway, nor if a helper thread loses its
# processor while the calling thread spins; `StepCostTracker` has rules for such steps.


MOST_LOST = 0.2  # the part of a step's time during which its thread may wait
MOST_IN_A_ROW = 8  # delayed steps; after more, the machine counts as busy for good, and their times are believed


class LostTime:
    """Compares a step's time with the CPU time of its thread."""

    def __init__(self, executor: Executor) -> None:
        self._cpu_seconds = executor.cpu_seconds if isinstance(executor, ComputesHere) else None
        self._began = 0.0
        self._in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """Note that a step begins now."""
        if self._cpu_seconds is not None:
            self._began = self._cpu_seconds()

    def was_held_up(self, seconds: float) -> bool:
        """Return True if a step that ends now was delayed, so that its time must be ignored. Begins the next step."""
        if self._cpu_seconds is None:
            return False
        began, self._began = self._began, self._cpu_seconds()
        if self._began - began >= (1 - MOST_LOST) * seconds:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= MOST_IN_A_ROW
