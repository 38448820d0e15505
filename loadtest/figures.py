"""The figures of one run, in full precision, and the line that goes into docs/benchmarks.md.

locust rounds its percentiles to two digits, which is too coarse for inter-token latencies of a few milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from loadtest.stream import Timeline

HEADER = (
    "| users | requests | failed | left | prompt tokens | output tok/s | TTFT p50 / p95 ms | ITL p50 / p95 / p99 ms "
    "| tok/s per stream p50 | end to end p50 / p95 s |\n"
    "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


@dataclass
class Figures:
    """Collects what every request gave. Used by one process."""

    finished: list[Timeline] = field(default_factory=list)
    left: list[Timeline] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    max_users: int = 0

    @property
    def num_ended(self) -> int:
        return len(self.finished) + len(self.left) + self.failures.total()

    def add(self, timeline: Timeline) -> None:
        (self.left if timeline.left else self.finished).append(timeline)

    def row(self) -> str:
        """One line under HEADER. Percentiles are over finished requests; ITL over all their gaps."""
        if not self.finished:
            return f"no request has finished; {self.failures.total()} failed, {len(self.left)} left"
        everyone = [*self.finished, *self.left]
        # From the first request to the last byte: ramp-up and the tail count, and so do tokens of those who left,
        # counted in pieces of text, since no usage came.
        seconds = max(t.ended for t in everyone) - min(t.started for t in everyone)
        num_tokens = sum(t.num_tokens for t in self.finished) + sum(len(t.arrivals) for t in self.left)
        ttft = [t.ttft * 1e3 for t in self.finished if t.ttft is not None]
        gaps = [gap * 1e3 for gap in chain.from_iterable(t.gaps for t in self.finished)]
        speeds = [speed for t in self.finished if (speed := t.tokens_per_second) is not None]
        e2e = [t.e2e for t in self.finished]
        prompts = [t.num_prompt_tokens for t in self.finished]
        cells = [
            f"{self.max_users}",
            f"{len(self.finished)}",
            f"{self.failures.total()}",
            f"{len(self.left)}",
            f"{min(prompts)} to {max(prompts)}",
            f"{num_tokens / seconds:.1f}",
            f"{percentile(ttft, 50):.0f} / {percentile(ttft, 95):.0f}",
            f"{percentile(gaps, 50):.1f} / {percentile(gaps, 95):.1f} / {percentile(gaps, 99):.1f}",
            f"{percentile(speeds, 50):.1f}",
            f"{percentile(e2e, 50):.1f} / {percentile(e2e, 95):.1f}",
        ]
        return f"| {' | '.join(cells)} |"


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed (nearest rank); NaN of none."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)] if ordered else float("nan")
