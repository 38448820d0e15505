"""Write headrace.json, the board, next to this file, one panel a line. Run it after a change; a test compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The filters of metrics that only Headrace has, of those that others have as well (vLLM, or any process), and of those
# of them that have a model.
I = 'instance=~"$instance"'  # noqa: E741 - short beside M
J = f'job="headrace",{I}'
M = f'model_name=~"$model",{J}'
LEGEND = "{{instance}}"

Query = tuple[str, str]  # the expression and its legend
Panel = tuple[str, str, str, list[Query]]  # title, unit, what it tells


def rate(metric: str, by: str = "instance", filters: str = M, suffix: str = "") -> Query:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return f"sum by ({by}) (rate({metric}{{{filters}}}[$__rate_interval]))", f"{legend} {suffix}".strip()


def share(part: str, whole: str) -> Query:
    return f"{rate(part)[0]} / {rate(whole)[0]}", LEGEND


def quantiles(metric: str, *percents: int, filters: str = M) -> list[Query]:
    buckets, _ = rate(f"{metric}_bucket", "le", filters)
    return [(f"histogram_quantile({percent / 100}, {buckets})", f"p{percent}") for percent in percents or (50, 90, 99)]


def total(metric: str, function: str = "sum") -> list[Query]:
    return [(f"{function}({metric}{{{M}}})", "")]


def per_second(metric: str) -> list[Query]:
    return [(f"sum(rate({metric}{{{M}}}[$__rate_interval]))", "")]


def level(metric: str, legend: str = LEGEND, filters: str = I) -> Query:
    return f"{metric}{{{filters}}}", legend


# fmt: off
OVERVIEW: list[Panel] = [
    ("Servers that answer", "none", "Of those that Prometheus knows.", [('sum(up{job="headrace"})', "")]),
    ("Running", "none", "Requests that are being computed.", total("vllm:num_requests_running")),
    ("Waiting", "none", "Requests that wait for a turn.", total("vllm:num_requests_waiting")),
    ("Tokens per second", "none", "Of answers.", per_second("vllm:generation_tokens_total")),
    ("First token, p90", "s", "Arrival to first token.", quantiles("vllm:time_to_first_token_seconds", 90)),
    ("Between tokens, p90", "s", "Of one answer.", quantiles("vllm:inter_token_latency_seconds", 90)),
    ("KV cache", "percentunit", "Share that requests own, at most.", total("vllm:kv_cache_usage_perc", "max")),
    ("Refused", "reqps", "Answered with 429.", per_second("vllm:admission_rejections_total")),
]
ROWS: dict[str, list[Panel]] = {
    "Latency": [
        ("First token", "s", "From arrival, queue included.", quantiles("vllm:time_to_first_token_seconds")),
        ("Between tokens", "s", "Of all tokens but the first.", quantiles("vllm:inter_token_latency_seconds")),
        ("Whole requests", "s", "Arrival to end, aborts included.", quantiles("vllm:e2e_request_latency_seconds")),
        ("Queue", "s", "Arrival to first schedule.", quantiles("vllm:request_queue_time_seconds")),
        ("Prefill", "s", "First schedule to first token.", quantiles("vllm:request_prefill_time_seconds")),
        ("Decode", "s", "First token to last.", quantiles("vllm:request_decode_time_seconds")),
        ("Per output token", "s", "Mean of each request.", quantiles("vllm:request_time_per_output_token_seconds")),
        ("Slow ones of the last hour", "percentunit",
         "First tokens after 2.5 s, gaps above 0.1 s. The budget is 1 %; alerts begin at 14.4 times that.",
         [level("headrace:first_token_slow:ratio_rate1h", "first tokens", 'model_name=~"$model"'),
          level("headrace:inter_token_slow:ratio_rate1h", "between tokens", 'model_name=~"$model"')]),
    ],
    "Throughput": [
        ("Tokens per second", "none", "Of prompts, cached ones included, and of answers.",
         [rate("vllm:prompt_tokens_total", suffix="prompts"), rate("vllm:generation_tokens_total", suffix="answers")]),
        ("Where prompts' keys and values come from", "none", "Tokens per second that were computed or found.",
         [rate("vllm:prompt_tokens_by_source_total", "source")]),
        ("Requests at once", "none", "Those that run, and those that wait.",
         [level("vllm:num_requests_running", "{{instance}} running", M),
          level("vllm:num_requests_waiting", "{{instance}} waiting", M)]),
        ("Tokens of a step", "none", "Mean; max_num_batched_tokens is the most.",
         [share("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count")]),
        ("Length of prompts", "none", "In tokens.", quantiles("vllm:request_prompt_tokens")),
        ("Length of answers", "none", "In tokens.", quantiles("vllm:request_generation_tokens")),
    ],
    "Queue and admission": [
        ("Queue", "s", "Until all who wait now have their first token, as far as is known.",
         [level("headrace:queued_seconds")]),
        ("Refusals", "reqps", "By the limit that refused; all are 429 with a Retry-After.",
         [rate("vllm:admission_rejections_total", "reason")]),
        ("How wrong expected waits are", "s", "Above 0: who was let in waited longer than expected.",
         quantiles("headrace:queue_wait_error_seconds", 10, 50, 90, filters=I)),
    ],
    "KV cache and prefix cache": [
        ("KV cache", "percentunit", "Share that requests own.", [level("vllm:kv_cache_usage_perc", filters=M)]),
        ("Size", "none", "Blocks, and tokens in each.",
         [level("vllm:cache_config_info", "{{instance}}: {{num_gpu_blocks}} blocks of {{block_size}} tokens", M)]),
        ("Preemptions", "ops", "Requests that were put back to make room.", [rate("vllm:num_preemptions_total")]),
        ("Prefix hits", "percentunit", "Of the prompt tokens that were looked up.",
         [share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")]),
        ("Cached tokens", "none", "Per second, as the usage of ended requests tells.",
         [rate("vllm:prompt_tokens_cached_total")]),
    ],
    "Tiers of the KV cache": [
        ("Held", "bytes", "As the servers last looked.", [level("headrace:kv_tier_bytes", "{{instance}} {{tier}}")]),
        ("Loaded and stored", "Bps", "Per second.",
         [rate("headrace:kv_tier_loaded_bytes_total", "tier", I, "loaded"),
          rate("headrace:kv_tier_stored_bytes_total", "tier", I, "stored")]),
        ("Tokens found", "none", "Per second; they need not be computed again.",
         [rate("headrace:kv_tier_hit_tokens_total", "tier", I)]),
        ("Time for it", "percentunit", "Seconds of each second; storing does not delay steps.",
         [rate("headrace:kv_tier_load_seconds_total", "tier", I, "loading"),
          rate("headrace:kv_tier_store_seconds_total", "tier", I, "storing")]),
        ("Failed loads", "ops", "Chunks damaged, missing or of another model; their tokens are computed.",
         [rate("headrace:kv_tier_failed_loads_total", "tier", I)]),
    ],
    "Tenants": [
        ("Requests", "reqps", "Answered or refused.", [rate("headrace:tenant_requests_total", "tenant", I)]),
        ("Tokens", "none", "Per second, of requests that ended.",
         [rate("headrace:tenant_tokens_total", "tenant, kind", I)]),
        ("Waiting", "none", "Choices that wait for their first token.",
         [level("headrace:tenant_waiting", "{{instance}} {{tenant}}")]),
        ("Refused", "reqps", "With 429.", [rate("headrace:tenant_requests_total", "tenant", f'status="429",{I}')]),
    ],
    "Ends, errors, aborts": [
        ("How requests end", "reqps", "abort: the client has left.",
         [rate("vllm:request_success_total", "finished_reason")]),
        ("Answers by status", "reqps", "Of all routes; unknown paths and wrong keys are in none.",
         [rate("http_requests_total", "status", J)]),
        ("Answers by route", "reqps", "Without probes and metrics.",
         [rate("http_requests_total", "handler, status", f'handler=~"/v1/.*",{J}')]),
        ("Tools left out", "reqps", "Requests with tools that this server does not support.",
         [rate("headrace:tools_left_out_total", "type", I)]),
    ],
    "Event loop and process": [
        ("Lag of the event loop", "s", "How late a sleeping task is woken; every stream feels it.",
         quantiles("headrace:event_loop_lag_seconds", filters=I)),
        ("Holds of the event loop", "s", "Processor time that a request took at a stretch.",
         quantiles("headrace:event_loop_hold_seconds", filters=I)),
        ("Engine stalled", "s", "With work and without a step; /livez fails at stall_limit.",
         [level("headrace:engine_stalled_seconds")]),
        ("Phase", "none", "What each server is doing.", [(f"headrace:phase{{{I}}} == 1", "{{instance}} {{phase}}")]),
        ("Uptime", "s", "Of the process.", [(f"time() - process_start_time_seconds{{{J}}}", LEGEND)]),
        ("Processors", "none", "That are busy.", [rate("process_cpu_seconds_total", filters=J)]),
        ("Memory", "bytes", "Resident.", [level("process_resident_memory_bytes", filters=J)]),
        ("Open files", "none", "Connections among them; and how many there may be.",
         [level("process_open_fds", filters=J), level("process_max_fds", "{{instance}} at most", J)]),
    ],
}
# fmt: on
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(kind: str, number: int, place: tuple[int, int, int, int], content: Panel) -> dict[str, Any]:
    title, unit, text, queries = content
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": text,
        "gridPos": dict(zip("xywh", place, strict=True)),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": letter, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for letter, (expression, legend) in zip("ABCDEF", queries, strict=False)
        ],
    }


def panels() -> list[dict[str, Any]]:
    """Eight figures on top, then rows with three graphs side by side."""
    made = [panel("stat", 1 + i, (3 * i, 0, 3, 4), content) for i, content in enumerate(OVERVIEW)]
    y = 4
    for title, contents in ROWS.items():
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        for index, content in enumerate(contents):
            place = (8 * (index % 3), y + 1 + 7 * (index // 3), 8, 7)
            made.append(panel("timeseries", len(made) + 1, place, content))
        y += 1 + 7 * -(-len(contents) // 3)
    return made


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """One that is filled by a query, and means all unless something is chosen."""
    everything = {"includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}}
    asked = {"datasource": DATASOURCE, "definition": query, "query": {"query": query, "refId": name}, "refresh": 2}
    return {"name": name, "label": label, "type": "query", **asked, **everything}


def board() -> str:
    """The board as JSON that Grafana loads, one panel a line."""
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("model", "Model", 'label_values(vllm:num_requests_running{job="headrace"}, model_name)'),
        variable(
            "instance",
            "Server",
            'label_values(vllm:num_requests_running{job="headrace",model_name=~"$model"}, instance)',
        ),
    ]
    head = {
        "uid": "headrace",
        "title": "Headrace",
        "tags": ["headrace"],
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": variables},
    }
    lines = ",\n".join(map(json.dumps, panels()))
    return f'{json.dumps(head)[:-1]}, "panels": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    Path(__file__).with_name("headrace.json").write_text(board())
