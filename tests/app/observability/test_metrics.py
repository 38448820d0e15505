"""What a dashboard may rely on."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.admission.admission import Limit
from app.observability.metrics import ITL_BUCKETS, Metrics
from engine.frontend.request_stream import FinishedRequest
from engine.messages import FinishReason, SchedulerStats, TierStats
from engine.routing.router import Router

DOCS = Path(__file__).parents[3] / "docs"


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the rendered page; labels that all of ours carry are checked and left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:") and sample.name != "vllm:lora_requests_info":
                assert labels.pop("model_name") == "tiny"
                assert labels.pop("engine") == "0"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def stats(**changes: Any) -> SchedulerStats:
    stats: dict[str, Any] = {
        "step": 1,
        "num_running": 0,
        "num_waiting": 0,
        "kv_cache_usage": 0.0,
        "num_preemptions": 0,
        "prompt_tokens": 0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
    }
    return SchedulerStats(**(stats | changes))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny")


def test_names_are_those_that_dashboards_ask_for(metrics: Metrics) -> None:
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    asked = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens request_success "
        "num_preemptions admission_rejections prompt_tokens_by_source "
        "prefix_cache_queries prefix_cache_hits prompt_tokens_cached time_to_first_token_seconds "
        "inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds request_prompt_tokens "
        "request_generation_tokens iteration_tokens_total request_prefill_time_seconds request_decode_time_seconds "
        "external_prefix_cache_queries external_prefix_cache_hits num_requests_waiting_by_reason "
        "request_params_n request_params_max_tokens request_num_preemptions request_prefill_kv_computed_tokens "
        "request_inference_time_seconds request_max_num_generation_tokens request_time_per_output_token_seconds"
    )
    assert {f"vllm:{name}" for name in asked.split()} <= families
    assert {"headrace:event_loop_lag_seconds", "headrace:event_loop_hold_seconds"} <= families  # whatever the prefix is
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info", "http_requests"} <= families
    assert not [name for name in families if name.endswith("_created")]


def test_the_prefix_is_ours_to_choose() -> None:
    page = Metrics("tiny", prefix="headrace_").render().decode()
    assert 'headrace_num_requests_running{engine="0",model_name="tiny"} 0.0' in page
    assert "vllm:" not in page


def test_gauges_follow_the_last_step_and_counters_add_up(metrics: Metrics) -> None:
    metrics.on_step(
        stats(num_running=3, num_waiting=2, kv_cache_usage=0.5, prompt_tokens=100, computed_tokens=100),
        generated_tokens=0,
    )
    decoded = stats(
        num_running=2,
        kv_cache_usage=0.25,
        num_preemptions=1,
        prefix_cache_queries=64,
        prefix_cache_hits=48,
        tier_misses=16,
        computed_tokens=2,
    )
    metrics.on_step(decoded, generated_tokens=2)
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 100
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 48
    assert value(metrics, "vllm:prompt_tokens_total") == 0, "usage, not work"
    assert value(metrics, "vllm:generation_tokens_total") == 2
    assert value(metrics, "vllm:num_preemptions_total") == 1
    assert value(metrics, "vllm:prefix_cache_queries_total") == 64
    assert value(metrics, "vllm:prefix_cache_hits_total") == 48
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 102
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2


def test_what_a_tier_was_asked_for_is_what_the_prefix_cache_lacked(metrics: Metrics) -> None:
    tier = TierStats(tier="disk", hit_tokens=32)
    metrics.on_step(stats(prefix_cache_queries=64, prefix_cache_hits=48, tier_misses=16, tiers=[tier]), 0)
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 48
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 32


def test_waiting_requests_are_told_apart_by_what_they_wait_for(metrics: Metrics) -> None:
    metrics.on_step(stats(num_waiting=5, num_deferred=2), 0)
    reasons = {"capacity": 3, "deferred": 2}
    for reason, number in reasons.items():
        assert value(metrics, "vllm:num_requests_waiting_by_reason", reason=reason) == number
    metrics.on_unload()
    for reason in reasons:
        assert value(metrics, "vllm:num_requests_waiting_by_reason", reason=reason) == 0


def test_an_idle_step_leaves_the_step_histogram_alone(metrics: Metrics) -> None:
    metrics.on_step(stats(), generated_tokens=0)
    assert value(metrics, "vllm:iteration_tokens_total_count") == 0


def test_every_reason_is_there_before_it_happens(metrics: Metrics) -> None:
    for reason in FinishReason:
        assert value(metrics, "vllm:request_success_total", finished_reason=reason.value) == 0


def test_a_refusal_is_counted_by_its_limit_and_is_no_finished_request(metrics: Metrics) -> None:
    for limit in Limit:
        assert value(metrics, "vllm:admission_rejections_total", reason=limit.value) == 0
    metrics.on_rejection(Limit.TOKENS)
    assert value(metrics, "vllm:admission_rejections_total", reason="max_queued_tokens") == 1
    for reason in FinishReason:
        assert value(metrics, "vllm:request_success_total", finished_reason=reason.value) == 0


def test_a_prompt_is_counted_as_its_usage_says(metrics: Metrics) -> None:
    metrics.on_prompt(7)
    metrics.on_prompt(5)
    assert value(metrics, "vllm:prompt_tokens_total") == 12


def test_an_abort_is_in_the_same_books_as_a_finish(metrics: Metrics) -> None:
    """Peers count an aborted request's tokens in one place and not in the other, and bills disagree."""
    done: dict[str, Any] = {
        "prompt_tokens": 10,
        "output_tokens": 5,
        "longest_output": 3,
        "cached_tokens": 4,
        "e2e_seconds": 1.0,
        "prefill_seconds": 0.2,
        "decode_seconds": 0.6,
    }
    metrics.on_request_finished(FinishedRequest(reason=FinishReason.STOP, **done, queue_seconds=0.1))
    never = {"queue_seconds": None, "prefill_seconds": None, "decode_seconds": None}
    metrics.on_request_finished(FinishedRequest(reason=FinishReason.ABORT, **done | never))
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    for name in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
        assert value(metrics, f"vllm:{name}_count") == 2
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 20
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 8
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 1
    for name, seconds in (("prefill", 0.2), ("decode", 0.6), ("inference", 0.8)):
        assert value(metrics, f"vllm:request_{name}_time_seconds_count") == 1
        assert value(metrics, f"vllm:request_{name}_time_seconds_sum") == pytest.approx(seconds)
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 6
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.3)


def test_parameters_and_work_of_a_request_are_in_histograms_as_vllm_has_them(metrics: Metrics) -> None:
    done: dict[str, Any] = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds"))
    done |= {"output_tokens": 1, "longest_output": 1, "e2e_seconds": 1.0, "prompt_tokens": 10, "cached_tokens": 4}
    metrics.on_request_finished(FinishedRequest(reason=FinishReason.STOP, **done))
    of_two = done | {"num_choices": 2, "max_tokens": 64, "num_preemptions": 3}
    metrics.on_request_finished(FinishedRequest(reason=FinishReason.LENGTH, **of_two))
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 12
    assert value(metrics, "vllm:request_params_n_sum") == 3
    assert value(metrics, "vllm:request_num_preemptions_sum") == 3
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 64
    assert value(metrics, "vllm:request_params_max_tokens_count") == 1, "the other sets no limit"


def test_tokens_that_arrive_together_are_each_counted(metrics: Metrics) -> None:
    metrics.on_first_token(0.05)
    metrics.on_inter_token(0.02)
    metrics.on_inter_token(0.04, count=3)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.14)
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le=str(ITL_BUCKETS[1])) == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="+Inf") == 4


def test_a_made_up_method_makes_no_series_of_its_own(metrics: Metrics) -> None:
    before = len(samples(metrics))
    for method in ("BREW", "X" * 5000, "get"):
        metrics.on_http_request("/v1/models", method, 405)
    assert value(metrics, "http_requests_total", handler="/v1/models", method="OTHER", status="4xx") == 3
    assert len(samples(metrics)) == before + 1


def test_what_no_tenant_has_asked_for_makes_no_series() -> None:
    metrics = Metrics("tiny", tenants=["acme", "zenith"])
    before = len(samples(metrics))
    for status in (200, 404, 429, 499, 500):
        metrics.on_tenant("acme", status, 10, 5)
    metrics.on_tenant("", 200, 10, 5)  # an administrator's
    metrics.on_tools_left_out(f"made_up_{number}" for number in range(1000))
    assert len(samples(metrics)) == before
    requests = {
        status: value(metrics, "headrace:tenant_requests_total", tenant="acme", status=status)
        for status in ("2xx", "4xx", "429", "5xx")
    }
    assert requests == {"2xx": 1, "4xx": 2, "429": 1, "5xx": 1}
    assert value(metrics, "headrace:tenant_tokens_total", tenant="acme", kind="prompt") == 50
    assert value(metrics, "headrace:tenant_tokens_total", tenant="acme", kind="generation") == 25
    assert value(metrics, "headrace:tenant_tokens_total", tenant="zenith", kind="prompt") == 0


def test_series_of_a_tenant_go_with_it_and_its_requests() -> None:
    metrics = Metrics("tiny", tenants=["acme", "zenith"])
    before = len(samples(metrics))
    metrics.set_tenants(["zenith-2"], busy={"acme"})
    assert "zenith-2" in (page := metrics.render().decode())
    assert 'tenant="acme"' in page
    assert 'tenant="zenith"' not in page
    metrics.set_tenants(["zenith-2", "other"])
    assert 'tenant="acme"' not in metrics.render().decode()
    assert len(samples(metrics)) == before


def test_gateways_find_how_the_kv_cache_is_divided(metrics: Metrics) -> None:
    told: dict[str, str] | None = None
    metrics.show(lambda: 0.0, lambda: 0.0, lambda tenant: 0, (), lambda phase: False, cache_config=lambda: told)
    assert "cache_config_info{" not in metrics.render().decode(), "not before the model is loaded"
    for num_blocks in ("1024", "2048"):  # another engine has come
        told = {"block_size": "16", "num_gpu_blocks": num_blocks, "enable_prefix_caching": "True"}
        assert value(metrics, "vllm:cache_config_info", **told) == 1
        assert metrics.render().decode().count("cache_config_info{") == 1
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert value(metrics, "vllm:lora_requests_info", **labels) > 0


def test_the_page_about_metrics_has_them_as_they_are() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert runpy.run_path(str(DOCS / "metrics_table.py"))["written"](page) == page, "python docs/metrics_table.py"
    assert "| `vllm:request_success_total` | counter |" in page


def test_how_engines_share_requests_is_told(metrics: Metrics) -> None:
    router = Router(2, 8)
    router.choose(["a"], list(range(1000)), [0, 1])
    metrics.show(
        lambda: 0.0, lambda: 0.0, lambda tenant: 0, (), lambda phase: False, routing=lambda: router.stats([0, 1], 3, 2)
    )
    assert value(metrics, "headrace:engine_load_seconds", engine="0") == router.loads[0] > 0
    assert value(metrics, "headrace:engine_load_seconds", engine="1") == 0
    assert value(metrics, "headrace:routed_prompts_total", reason="load") == 1
    assert value(metrics, "headrace:engines_with_guessed_cache") == 2
    assert value(metrics, "headrace:requests_placed_again_total") == 3
    assert value(metrics, "headrace:engine_deaths_total") == 2
    assert value(metrics, "headrace:routing_bytes") > 100


def test_two_servers_in_a_process_count_for_themselves(metrics: Metrics) -> None:
    Metrics("tiny").on_first_token(1.0)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
