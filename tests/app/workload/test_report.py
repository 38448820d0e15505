"""The result of a run has the keys of vLLM's benchmarks, and its figures are what numpy says."""

from __future__ import annotations

import numpy as np
import pytest

from app.workload.report import RequestRecord, concurrency, per_request, summarize

# What scripts that read the results of vLLM's `bench serve` look for.
KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}
DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
}


def records(seed: int = 0, number: int = 50) -> list[RequestRecord]:
    draw = np.random.default_rng(seed)
    made = []
    for start in draw.uniform(0, 10, number):
        times = (start + 0.01 + np.cumsum(draw.exponential(0.02, draw.integers(1, 30)))).tolist()
        made.append(RequestRecord(start - 0.001, start, times, times[-1] + 0.001, 7, len(times), 3, status=200))
    return made


def refusal(start: float) -> RequestRecord:
    return RequestRecord(start, start, [], start + 0.1, status=429, retry_after=2.0, error="HTTP 429 queue_full")


def test_keys_are_those_of_vllm() -> None:
    assert summarize(records()).keys() >= KEYS
    assert per_request(records()).keys() >= DETAILS
    assert all(len(values) == 50 for values in per_request(records()).values())


def test_figures_are_what_numpy_says() -> None:
    made = records()
    result = summarize([*made, refusal(3.0)], percentiles=(50, 99.9))
    ttfts = np.array([r.token_times[0] - r.start_time for r in made]) * 1e3
    gaps = np.concatenate([np.diff(r.token_times) for r in made]) * 1e3
    tpots = [
        1e3 * (r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1) for r in made if len(r.token_times) > 1
    ]
    for name, values in (("ttft", ttfts), ("itl", gaps), ("tpot", np.array(tpots))):
        assert result[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert result[f"median_{name}_ms"] == result[f"p50_{name}_ms"] == pytest.approx(np.median(values))
        assert result[f"std_{name}_ms"] == pytest.approx(values.std())
        assert result[f"p99.9_{name}_ms"] == pytest.approx(np.percentile(values, 99.9))
    duration = max(r.end_time for r in made) - min(r.scheduled_time for r in made)
    assert result["duration"] == pytest.approx(duration)
    assert summarize(made, began=-1.0)["duration"] == pytest.approx(max(r.end_time for r in made) + 1)
    assert result["total_output_tokens"] == sum(len(r.token_times) for r in made)
    assert result["total_input_tokens"] == 350
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / duration)


def test_refusals_are_told_beside_and_count_in_no_latency() -> None:
    plain, refused = summarize(records()), summarize([*records(), refusal(1.0), refusal(2.0)])
    assert (refused["completed"], refused["failed"], refused["refused"]) == (50, 2, 2)
    assert refused["failures"] == {"HTTP 429 queue_full": 2}
    assert refused["retry_after"] == [2.0, 2.0]
    assert refused["p99_ttft_ms"] == plain["p99_ttft_ms"]


def test_goodput_counts_who_keeps_every_objective() -> None:
    made = records()
    result = summarize([*made, refusal(1.0)], slo={"ttft": 30, "e2el": 300})
    good = sum(1e3 * r.ttft <= 30 and 1e3 * r.e2el <= 300 for r in made)
    assert 0 < good < 50
    assert result["request_goodput"] == pytest.approx(good / result["duration"])
    assert summarize(made)["request_goodput"] is None


def test_concurrency_rises_and_falls_with_the_requests() -> None:
    made = [RequestRecord(0, start, [end], end) for start, end in ((0, 3), (1, 2), (2, 4), (5, 6))]
    assert concurrency(made) == [(0, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 0), (5, 1), (6, 0)]
    assert summarize(made)["max_concurrent_requests"] == 2


def test_a_run_of_nothing_has_zeros() -> None:
    for made in ([], [refusal(0.0)]):
        result = summarize(made)
        assert result["completed"] == result["output_throughput"] == result["p99_ttft_ms"] == 0
