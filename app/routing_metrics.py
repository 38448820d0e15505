"""What `/metrics` says of how several engines share the requests, and of what they hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.routing.stats import RoutingStats


class RoutingCollector(Collector):
    """How several engines share the requests, read when it is asked for. Zeros where there is one engine."""

    def __init__(self, read: Callable[[], RoutingStats | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read() or RoutingStats()
        load = GaugeMetricFamily(
            "headrace:engine_load_seconds", "Work that waits or runs in an engine.", None, ["engine"]
        )
        for engine, seconds in enumerate(stats.loads or (0.0,)):
            load.add_metric([str(engine)], seconds)
        yield load
        routed = CounterMetricFamily(
            "headrace:routed_prompts", "Prompts given to one of several engines, by what for.", None, ["reason"]
        )
        routed.add_metric(["prefix"], stats.num_by_prefix)
        routed.add_metric(["load"], stats.num_by_load)
        yield routed
        text = "Requests given to another engine because theirs had died while they waited."
        yield CounterMetricFamily("headrace:requests_placed_again", text, stats.num_placed_again)
        yield GaugeMetricFamily("headrace:engines", "Engines that run.", stats.num_engines)
        text = "Times that an engine has died; it is started again."
        yield CounterMetricFamily("headrace:engine_deaths", text, stats.num_deaths)
        text = "Engines that do not publish what their prefix cache holds, so that it is guessed."
        yield GaugeMetricFamily("headrace:engines_with_guessed_cache", text, stats.num_guessed)
        yield CounterMetricFamily(
            "headrace:kv_event_gaps", "Times that KV events of an engine were lost.", stats.num_gaps
        )
        text = "Memory that knowing the engines' prefix caches takes, about."
        yield GaugeMetricFamily("headrace:routing_bytes", text, stats.num_bytes)


class CacheConfigCollector(Collector):
    """How the KV cache is divided, read when it is asked for: engines come and go. Nothing before there is one."""

    def __init__(self, name: str, labels: Mapping[str, str], read: Callable[[], Mapping[str, str] | None]) -> None:
        self._name, self._labels, self._read = name, labels, read

    def collect(self) -> Iterator[Metric]:
        text = "How the KV cache is divided, told by the labels; 1 once the model is loaded."
        found = self._read()
        labels = {} if found is None else {**self._labels, **found}
        family = GaugeMetricFamily(self._name, text, None, list(labels))
        if labels:
            family.add_metric(list(labels.values()), 1)
        yield family
