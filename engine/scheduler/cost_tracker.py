"""Keeps a `StepCostTable` true, by the steps that are made.

One step says little: it may have been held up by whatever else the machine does. So what is told of a size moves only
when its three latest steps were all slower than told, or all quicker, and by the smallest difference. A single step
that took a hundred times as long moves nothing; a machine that has become slower is followed within some steps; and
where steps vary, the table tells the middle of them. A size that was measured fewer than three times, in all or
since this tracker was made, follows one quicker step at once: other work on the machine can only make a step slower.

The cost of a size that was not measured lately follows its neighbours, because it may come from another process or from
a time when the machine was busy. If one of two sizes was measured just now, the larger one costs at most its share of
the smaller one (`Curve.share_out`); otherwise pacing would never try it again.

A step has one time and several parts. Each gets its share of a difference by what it contributes. What decodes cost is
known from the steps without prefill; those with both only lower it, where it is more than they take.

Owned by the EngineCore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.scheduler.step_cost import KEYS_PER_TOKEN, SETTLED, Curve, StepCostTable, StepLoad

_LATELY = 64  # measures of a curve
_LEAST_SECONDS = 1e-9  # of any step
_MOST = 7.0  # of a natural logarithm: a thousandfold at once
_LEAST = 0.005  # of the same: half a percent is not worth its own cost
# Tokens are seen in every step, many keys only in some: so of what has grown with both, keys get this much more.
_KEYS_BLAME = 4

Part = tuple[float, float, Callable[[float], None]]  # seconds, blame, and what multiplies them by e to some power
Rate = Literal["decode_key", "prefill_key", "prefill_row"]


@dataclass(slots=True)
class _Size:
    """The latest measures of one size of a curve: the logarithms of measured by stated seconds for the last two, their
    count, and the number of the latest one among the curve's measures."""

    older: float = 0.0
    old: float = 0.0
    count: int = 0
    latest: int = 0


class _Measures:
    """The measures of a curve since this process began."""

    def __init__(self) -> None:
        self.number = 0
        self.sizes: dict[int, _Size] = {}  # by index

    def count(self, index: int) -> _Size:
        """Count one more measure of the size at this index, and return its latest measures."""
        self.number += 1
        size = self.sizes.setdefault(index, _Size())
        size.latest = self.number
        return size

    @property
    def lately(self) -> list[int]:
        """The indices of the sizes that were measured lately."""
        return [index for index, size in self.sizes.items() if self.number - size.latest < _LATELY]


class StepCostTracker:
    """The keeper of `table`. `changes` is the sum of the logarithms by which the table has changed."""

    def __init__(self, table: StepCostTable) -> None:
        self.table = table
        for curve in (table.decode, table.prefill, table.mixed):
            curve.lift(_LEAST_SECONDS)
        self.changes = 0.0
        self._measures = {id(curve): _Measures() for curve in (table.decode, table.prefill, table.mixed)}
        rates: tuple[Rate, ...] = ("decode_key", "prefill_key", "prefill_row")
        self._scale = {rate: partial(self._scale_rate, rate) for rate in rates}

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took so long, from its beginning to that of the next."""
        table, seconds = self.table, max(seconds, _LEAST_SECONDS)
        decodes, decode_keys, prefills, tokens, keys = load
        if not tokens:
            if decodes:
                self._learn(table.decode, decodes, seconds, "decode_key", decode_keys)
            return
        prompts = max(prefills - 1, 0)
        if not decodes:
            self._learn(table.prefill, tokens, seconds, "prefill_key", keys, prompts)
            return
        if table.prefill.is_known and seconds < table.prefill.at(tokens):
            self._learn(table.prefill, tokens, seconds, "prefill_key", keys, prompts)
        alone = table.cost(StepLoad(decodes, decode_keys))
        if seconds > alone or not table.mixed.is_known:
            added = max(seconds - alone, 0.1 * seconds)
            self._learn(table.mixed, tokens, added, "prefill_key", keys, prompts, decode_seconds=alone)
        else:  # quicker than the decodes are held to be without it, so it is this belief that is out of date
            of_decodes = self._parts(table.decode, decodes, "decode_key", decode_keys)
            self._learn(table.mixed, tokens, seconds, "prefill_key", keys, prompts, of_decodes, decode_seconds=alone)

    def _learn(
        self,
        curve: Curve,
        size: int,
        seconds: float,
        rate: Rate,
        keys: int,
        prompts: int = 0,
        others: Sequence[Part] = (),
        decode_seconds: float = 0.0,
    ) -> None:
        """Learn that this part of a step took `seconds` with `others`. The step took `decode_seconds` besides."""
        if not curve.is_known:
            curve.begin(size, seconds)
            self._measures[id(curve)].count(curve.nearest(size)).count = 1
            if not getattr(self.table, rate):
                self._set_rate(rate, seconds / size / KEYS_PER_TOKEN)
            return
        table = self.table
        told = curve.at(size) + getattr(table, rate) * keys + table.prefill_row * prompts
        for part, *_ in others:
            told += part
        log_ratio = max(-_MOST, min(math.log(seconds / told), _MOST))
        if change := self._change(curve, curve.nearest(size), log_ratio):
            parts = [*self._parts(curve, size, rate, keys, prompts), *others]
            share = change * told / sum(part * blame for part, blame, _ in parts)
            for _, blame, scale in parts:
                if blame:
                    scale(share * blame)
        if log_ratio <= change:  # the step took no longer than the table says now
            curve.share_out(size, decode_seconds)

    def _parts(self, curve: Curve, size: int, rate: Rate, keys: int, prompts: int = 0) -> list[Part]:
        table = self.table
        own, of_keys = curve.at(size), getattr(table, rate) * keys
        parts: list[Part] = [
            (own, own, partial(self._scale_curve, curve, size)),
            (of_keys, _KEYS_BLAME * of_keys, self._scale[rate]),
        ]
        if prompts:
            of_prompts = table.prefill_row * prompts
            parts.append((of_prompts, of_prompts, self._scale["prefill_row"]))
        return parts

    def _scale_curve(self, curve: Curve, size: int, log_factor: float) -> None:
        curve.scale(size, log_factor, self._measures[id(curve)].lately)

    def _scale_rate(self, rate: Rate, log_factor: float) -> None:
        self._set_rate(rate, getattr(self.table, rate) * math.exp(log_factor))

    def _set_rate(self, rate: Rate, seconds: float) -> None:
        setattr(self.table, rate, seconds)

    def _change(self, curve: Curve, index: int, log_ratio: float) -> float:
        """By which logarithm what is told is to change."""
        measures, count = self._measures[id(curve)].count(index), curve.counts[index]
        curve.counts[index] = count + 1
        measures.count += 1
        least = min(measures.older, measures.old, log_ratio)
        most = max(measures.older, measures.old, log_ratio)
        change = max(least, 0.0) + min(most, 0.0)
        if not count or (min(count, measures.count - 1) < SETTLED and log_ratio < 0.0):
            change = log_ratio
        elif -_LEAST <= change <= _LEAST:
            change = 0.0
        measures.older, measures.old = measures.old - change, log_ratio - change
        self.changes += abs(change)
        return change
