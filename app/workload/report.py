"""The records of all requests, and the result that is computed from them, with the keys of vLLM's benchmarks.

Real runs and simulations share both. Times are seconds in records, milliseconds under keys that end in `_ms`.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from app.config.settings import SettingsError

METRICS = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")  # latencies with one value per request
PERCENTILES = (50.0, 90.0, 99.0)
STEPS = {  # the steps of each curve of a step-cost table, in words, before a number of tokens
    "decode": "decodes of",
    "prefill": "prefills of",
    "mixed": "prefills with decodes of",
}


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds on one clock."""

    scheduled_time: float  # when it was due
    start_time: float = 0.0  # when its first byte was sent
    token_times: list[float] = field(default_factory=list)  # when each piece of text came, most of them a token each
    end_time: float = 0.0  # when the last byte of the answer came, or when the request failed
    num_prompt_tokens: int = 0  # as the server counted
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    has_usage: bool = True  # the server sent its token counts; without them they are estimates
    status: int = 0  # of HTTP; 0 where no answer came
    retry_after: float | None = None  # seconds, of a refusal
    error: str = ""  # the kind of failure, by which failures are counted; empty: the answer is complete
    message: str = ""  # the server's message for a failure
    request_id: str = ""
    text: str = ""
    token_choices: list[int] = field(default_factory=list)  # the number of each piece's choice; empty: one choice

    def mark_unsent(self, time: float) -> None:
        """Mark as failed and never sent, because the previous turn of its conversation failed."""
        self.scheduled_time = self.start_time = self.end_time = time
        self.error = "not sent: the previous turn failed"

    @property
    def ttft(self) -> float:
        """Time to first token; 0 if there was none."""
        return self.token_times[0] - self.start_time if self.token_times else 0.0

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between pieces of text of one choice."""
        times: defaultdict[int, list[float]] = defaultdict(list)
        for choice, time in zip(self.token_choices or [0] * len(self.token_times), self.token_times, strict=True):
            times[choice].append(time)
        return [later - earlier for each in times.values() for earlier, later in pairwise(each)]

    @property
    def e2el(self) -> float:
        """End-to-end latency: until the last piece of text."""
        return self.token_times[-1] - self.start_time if self.token_times else 0.0

    @property
    def tpot(self) -> float:
        """Time per output token of a choice after the first; 0 for a single one."""
        more = self.num_output_tokens / max(1, len(set(self.token_choices))) - 1
        return (self.e2el - self.ttft) / more if more > 0 else 0.0

    @property
    def refused(self) -> bool:
        return self.status in (429, 503)


def summarize(
    records: Sequence[RequestRecord],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = PERCENTILES,
    slo: Mapping[str, float] | None = None,
    began: float | None = None,
) -> dict[str, Any]:
    """Return the result of a run. Latencies are of requests with complete answers; `slo` are milliseconds by metric,
    and a request counts as good if it keeps all of them.

    The duration is from `began`, by default the time at which the first request was due, to the end of the last one.
    """
    done = [record for record in records if not record.error]
    failed = [record for record in records if record.error]
    began = min((r.scheduled_time for r in records), default=0.0) if began is None else began
    duration = max((r.end_time for r in records), default=began) - began
    per_second = 1 / duration if duration else 0.0
    num_input, num_output = sum(r.num_prompt_tokens for r in done), sum(r.num_output_tokens for r in done)
    good = [r for r in done if slo and all(1e3 * getattr(r, name) <= limit for name, limit in slo.items())]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(failed),
        "refused": sum(r.refused for r in failed),
        "failures": dict(Counter(r.error for r in failed).most_common(20)),
        "failure_messages": {r.error: r.message for r in reversed(failed) if r.message},  # the first of each
        "retry_after": [r.retry_after for r in failed if r.retry_after is not None],
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_without_usage": sum(not r.has_usage for r in done),
        "total_cached_tokens": sum(r.num_cached_tokens for r in done),
        "request_throughput": len(done) * per_second,
        "request_goodput": len(good) * per_second if slo else None,
        "output_throughput": num_output * per_second,
        "total_token_throughput": (num_input + num_output) * per_second,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": max((number for _, number in concurrency(records)), default=0),
    }
    seconds = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.num_output_tokens > 1],
        "itl": [gap for r in done for gap in r.itls],
        "e2el": [r.e2el for r in done],
    }
    for name in metrics:
        result |= statistics(name, seconds[name], percentiles)
    return result


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles (linear between neighbours), in ms; 0 of no values."""
    values = 1e3 * np.asarray(seconds or (0.0,))
    figures = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    figures |= {f"p{p:g}_{name}_ms": np.percentile(values, p) for p in percentiles}
    return {key: float(value) for key, value in figures.items()}


def per_request(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return the lists that `--save-detailed` adds, with an entry for each request in the order of the workload."""
    return {
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "latencies": [r.e2el for r in records],
        "start_times": [r.start_time for r in records],
        "queue_times": [max(0.0, r.start_time - r.scheduled_time) for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [f"{r.error}: {r.message}" if r.message else r.error for r in records],
        "scheduled_times": [r.scheduled_time for r in records],
        "cached_lens": [r.num_cached_tokens for r in records],
        "request_ids": [r.request_id for r in records],
    }


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Return (time, number of open requests) for each change of that number."""
    changes = sorted([(r.start_time, 1) for r in records] + [(r.end_time, -1) for r in records])
    steps, now = [], 0
    for time, change in changes:  # at one time those that end come first
        now += change
        steps.append((time, now))
    return steps


def _peak_rate(records: Sequence[RequestRecord]) -> float:
    """Return the output tokens of the best second, in whole seconds since the first request. Each piece of text counts
    an equal share of its request's tokens, since one piece may be several tokens."""
    began = min((r.start_time for r in records), default=0.0)
    rates: defaultdict[int, float] = defaultdict(float)
    for record in records:
        for time in record.token_times:
            rates[int(time - began)] += record.num_output_tokens / len(record.token_times)
    return max(rates.values(), default=0.0)


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:500` and others like it to milliseconds by metric. Raises SettingsError."""
    limits = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            name = ""
        if name.strip() not in SLO_METRICS:
            raise SettingsError(f"--goodput: got {text!r}; allowed: {', '.join(SLO_METRICS)}, a colon, milliseconds")
    return limits


def output_file(text: str) -> Path:
    """Parse a flag that names a result file, and check before the measurement that it can be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"got {text}; allowed: a file in a folder that exists")
    return path
