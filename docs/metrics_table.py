"""Writes the tables of metrics.md beside this file, from the registry. Run it after a change of
app/observability/metrics.py; a test compares.

A metric that has no series yet is given one, so that its labels are known. Series are counted for one tenant.
"""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from app.observability.metrics import Metrics
from app.serving.server import ServerPhase

BEGIN, END = "<!-- written by metrics_table.py -->\n", "<!-- end -->\n"
UNITS = {"seconds": "seconds", "bytes": "bytes", "tokens": "tokens", "perc": "share, 0 to 1"}
UNNAMED = {
    "vllm:prompt_tokens_cached": "tokens",
    "vllm:prompt_tokens_by_source": "tokens",
    "vllm:iteration_tokens_total": "tokens",
    "vllm:lora_requests_info": "Unix time",
    "vllm:prefix_cache_queries": "tokens",
    "vllm:request_params_max_tokens": "tokens",
    "vllm:prefix_cache_hits": "tokens",
    "vllm:external_prefix_cache_queries": "tokens",
    "vllm:external_prefix_cache_hits": "tokens",
    "process_start_time_seconds": "Unix time",
    "headrace:expert_imbalance": "times the mean",
}
BOUNDED = {
    "headrace:expert_tokens": "layers with experts",
    "headrace:expert_imbalance": "layers with experts",
    "http_requests": "routes × 8 × 4",  # methods and others; 2xx to 5xx
}


def table() -> str:
    """All metrics of a server with the default prefix, as a table of Markdown."""
    metrics = Metrics("model")
    cache = {"block_size": "16", "num_gpu_blocks": "1024", "enable_prefix_caching": "True"}
    metrics.show(
        lambda: 0.0, lambda: 0.0, lambda tenant: 0, ServerPhase, lambda phase: False, cache_config=lambda: cache
    )
    metrics.on_http_request("/v1/models", "GET", 200)
    metrics.on_expert_load([(0, 1.0)])
    lines = ["| name | type | labels | unit | series | |", "| --- | --- | --- | --- | --- | --- |"]
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        shown = ", ".join(f"`{label}`" for label in labels)
        unit = UNNAMED.get(family.name) or UNITS.get(family.name.rpartition("_")[2], "")
        series = BOUNDED.get(family.name) or str(_count(family.samples))
        lines.append(f"| `{name}` | {family.type} | {shown} | {unit} | {series} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def _count(samples: list[Sample]) -> int:
    return len({(sample.name, *sorted(sample.labels.items())) for sample in samples})


def written(page: str) -> str:
    """The page with the table as it is now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table()}{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    path = Path(__file__).with_name("metrics.md")
    path.write_text(written(path.read_text()))
