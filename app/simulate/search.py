"""What if: one run for each combination of settings, and the highest rate that keeps its promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from app.bench.report import METRICS
from app.settings import SettingsError

MAX_RUNS = 64  # of a sweep
BRACKET = 1.02  # between the rate that holds and the one that does not
MAX_DOUBLINGS = 12
CHECK_SEEDS = 5  # a rate holds if it holds with most of them

Simulate = Callable[[float, int], Mapping[str, Any]]  # of a rate and a seed: the result


def parse_sweeps(given: Sequence[str]) -> list[dict[str, str]]:
    """Of `max_num_seqs=8,16` and others like it: all combinations. Raises SettingsError."""
    axes: dict[str, list[str]] = {}
    for text in given:
        name, found, values = text.partition("=")
        axes[name.strip().replace("-", "_")] = parts = [part.strip() for part in values.split(",") if part.strip()]
        if not found or not parts:
            raise SettingsError(f"--sweep: got {text!r}; allowed: NAME=VALUE,VALUE. What works: max_num_seqs=8,16,32")
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(combinations) > MAX_RUNS:
        raise SettingsError(f"--sweep: {len(combinations)} combinations; allowed: at most {MAX_RUNS}")
    return combinations


def parse_slo(text: str) -> dict[str, float]:
    """Of `ttft_p99=0.5,itl_p99=0.05`: seconds by the keys of a result. Raises SettingsError."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        metric, _, statistic = name.strip().partition("_")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if metric not in METRICS or statistic not in ("mean", "p50", "p90", "p99") or not seconds > 0:
            raise SettingsError(
                f"--slo: got {part!r}; allowed: {', '.join(METRICS)}, each with _mean, _p50, _p90 or _p99, and seconds "
                "above 0. What works: ttft_p99=0.5,itl_p99=0.05"
            )
        limits[f"{statistic}_{metric}_ms"] = seconds
    return limits


class FoundRate(NamedTuple):
    """The highest rate found that holds, and the lowest that does not, in requests per second. Of so many seeds, so
    many hold at each."""

    holds: float
    fails: float
    num_seeds: int
    hold_at_holds: int
    hold_at_fails: int
    runs: int

    def __str__(self) -> str:
        return (
            f"{self.holds:.3g} requests/s hold (with {self.hold_at_holds} of {self.num_seeds} seeds), {self.fails:.3g} "
            f"do not (they hold with {self.hold_at_fails} of {self.num_seeds}); found in {self.runs} runs"
        )


def find_rate(simulate: Simulate, limits: Mapping[str, float], seed: int = 0) -> FoundRate:
    """Bisect, with the same random numbers at each rate, so that only the rate differs. A run holds if all requests
    were answered, and no figure is above its limit; a rate holds if the runs of most seeds hold. Raises SettingsError
    if no rate holds, or every rate does."""
    kept: dict[tuple[float, int], bool] = {}
    seeds = range(seed, seed + CHECK_SEEDS)
    most = CHECK_SEEDS // 2 + 1

    def keeps(rate: float, seed: int) -> bool:
        if (rate, seed) not in kept:
            result = simulate(rate, seed)
            kept[rate, seed] = not result["failed"] and all(result[key] <= 1e3 * s for key, s in limits.items())
        return kept[rate, seed]

    def holds(rate: float) -> bool:
        held = failed = 0
        for each in seeds:
            held, failed = (held + 1, failed) if keeps(rate, each) else (held, failed + 1)
            if most in (held, failed):
                break
        return held == most

    low = high = 1.0
    if holds(low):
        while holds(high := high * 2):
            low = high
            if high >= 2**MAX_DOUBLINGS:
                raise SettingsError(
                    f"--find: {high:g} requests/s still hold: allowed is a workload that lasts, give more --num-prompts"
                )
    else:
        while not holds(low := low / 2):
            high = low
            if low <= 2**-MAX_DOUBLINGS:
                raise SettingsError(f"--slo: not even {low:.2g} requests/s hold; allowed: what one request alone keeps")
    while high / low > BRACKET:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    hold_at_holds, hold_at_fails = (sum(keeps(rate, each) for each in seeds) for rate in (low, high))
    return FoundRate(low, high, CHECK_SEEDS, hold_at_holds, hold_at_fails, len(kept))
