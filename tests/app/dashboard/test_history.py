"""The dashboard's history: its percentiles against exact ones, its rates, and its bounds."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from app.admission.admission import Limit
from app.dashboard.history import EVERY, MAX_MODELS, SPANS, History, Series, bucket_quantile
from app.observability.metrics import ITL_BUCKETS, TTFT_BUCKETS, Metrics, Totals
from app.serving.model_pool import ModelPool
from engine.messages import SchedulerStats
from protocol.errors import ApiError


def history_of(metrics: Metrics) -> History:
    server = SimpleNamespace(metrics=metrics, phase="ready", started=0.0, tenants=SimpleNamespace(administered=False))
    return History(cast(ModelPool, SimpleNamespace(server=server, models=[])))


def columns_of(history: History, span: str, name: str = "tiny") -> dict[str, list[Any]]:
    return msgspec.json.decode(history.answer(span))["series"][name]


def step(metrics: Metrics, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, prompt: int = 0, out: int = 0):
    levels: dict[str, Any] = {"num_running": running, "num_waiting": waiting, "kv_cache_usage": kv_usage}
    none: Any = dict.fromkeys(("step", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"), 0)
    metrics.on_step(SchedulerStats(**levels, **none, prompt_tokens=prompt), out)


@pytest.mark.parametrize("bounds", [TTFT_BUCKETS, ITL_BUCKETS])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_percentile_is_within_the_bucket_of_the_exact_one(bounds: tuple[float, ...], count: int) -> None:
    values = np.random.default_rng(count).lognormal(-3, 2, count)
    counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1).tolist()
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        found = bucket_quantile(bounds, counts, share)
        assert found is not None
        index = int(np.searchsorted(bounds, exact))
        if index == len(bounds):
            assert found == bounds[-1]
        else:
            assert (bounds[index - 1] if index else 0.0) <= found <= bounds[index]


def test_a_percentile_of_even_values_is_nearly_exact() -> None:
    values = np.linspace(0.0, 0.1, 10_001)[1:]  # all bounds up to 0.1 divide it evenly
    counts = np.bincount(np.searchsorted(TTFT_BUCKETS, values), minlength=len(TTFT_BUCKETS) + 1).tolist()
    for share in (0.05, 0.5, 0.99):
        assert bucket_quantile(TTFT_BUCKETS, counts, share) == pytest.approx(0.1 * share, abs=1e-4)
    assert bucket_quantile(TTFT_BUCKETS, [0] * (len(TTFT_BUCKETS) + 1), 0.5) is None


def test_a_point_has_what_came_in_its_interval_and_an_idle_one_has_zeros() -> None:
    metrics = Metrics("tiny")
    history = history_of(metrics)
    history.look(0.0)
    step(metrics, running=3, waiting=2, kv_usage=0.5, prompt=100, out=50)
    for seconds in (0.3, 0.3, 3.0):
        metrics.on_first_token(seconds)
    metrics.on_inter_token(0.02, 99)
    metrics.on_inter_token(9.0, 1)
    metrics.on_rejection(Limit.TIME)
    history.look(EVERY)
    step(metrics)
    for look in (2, 3):
        history.look(look * EVERY)
    found = columns_of(history, "15m")
    assert found["generated"] == [0.0, 50 / EVERY, 0.0, 0.0]
    assert found["computed"] == [0.0, 100 / EVERY, 0.0, 0.0]
    assert found["running"] == [0.0, 3.0, 0.0, 0.0]
    assert found["waiting"] == [0.0, 2.0, 0.0, 0.0]
    assert found["kv_usage"] == [0.0, 0.5, 0.0, 0.0]
    assert found["refused"] == [{}, {"max_queue_time": 1}, {}, {}]
    assert [each is None for each in found["ttft_p50"]] == [True, False, True, True]
    assert 0.25 <= found["ttft_p50"][1] <= 0.5
    assert 2.5 <= found["ttft_p99"][1] <= 5.0
    assert 0.01 <= found["gap_p99"][1] <= 0.025
    ages = found["age"]
    assert [round(older - newer, 1) for older, newer in pairwise(ages)] == [EVERY] * 3


def test_the_interval_that_still_runs_is_the_last_point_of_a_long_span() -> None:
    metrics = Metrics("tiny")
    history = history_of(metrics)
    for look in range(4):
        step(metrics, running=look, out=10)
        history.look(look * EVERY)
    found = columns_of(history, "24h")
    assert found["generated"] == [40 / (4 * EVERY)]
    assert found["running"] == [1.5]
    for look in range(4, 100):
        history.look(look * EVERY)
    assert len(columns_of(history, "24h")["generated"]) == 2


@pytest.mark.parametrize("span", SPANS)
def test_points_are_bounded(span: str) -> None:
    seconds, most = SPANS[span]
    series = Series(seconds, most, Totals(), 0.0)
    for look in range(1, int(1.2 * seconds * most / EVERY)):
        series.look(Totals(generated=100.0 * look), look * EVERY)
    points = series.points
    assert len(points) in (most, most + 1)
    assert {point.figures[0] for point in points} == {100 / EVERY}
    assert points[-1].time - points[0].time <= seconds * most


def test_models_are_bounded_and_the_longest_idle_ones_are_dropped() -> None:
    metrics = Metrics("")
    models = [metrics.of_model(f"model-{number}") for number in range(MAX_MODELS + 3)]
    history = history_of(metrics)
    for look, each in enumerate(models):
        step(each, out=1)
        history.look(look * EVERY)
    series = msgspec.json.decode(history.answer("15m"))["series"]
    assert list(series) == [each.name for each in reversed(models[3:])]


def test_a_dropped_model_that_works_again_starts_with_the_tokens_since_then() -> None:
    metrics = Metrics("")
    models = [metrics.of_model(f"model-{number}") for number in range(MAX_MODELS + 1)]
    history = history_of(metrics)
    step(models[0], out=1000)
    history.look(0.0)
    for each in models[1:]:
        step(each, out=1)
    history.look(EVERY)
    assert "model-0" not in msgspec.json.decode(history.answer("15m"))["series"]
    step(models[0], out=10)
    history.look(2 * EVERY)
    assert columns_of(history, "15m", "model-0")["generated"] == [10 / EVERY]


def test_an_unknown_span_is_refused_with_those_there_are() -> None:
    with pytest.raises(ApiError, match="allowed: 15m, 24h"):
        history_of(Metrics("tiny")).answer("7d")
