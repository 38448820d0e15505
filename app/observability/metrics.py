"""The metrics of /metrics, under vLLM's names.

The front end calls the `on_*` methods on the event loop; `on_step` and `on_inter_token` are the hot ones. Children of
labelled metrics are bound once, because looking one up costs more than counting. Accounting:

1. An accepted request is counted exactly once in `request_success_total`, with the reason of its end, aborts and errors
   included. Its tokens are in the per-request histograms whatever the reason.
2. `prompt_tokens_total` and `generation_tokens_total` are the sum of the usage of all accepted requests. A prompt
   counts once, cached or not, with its first token, or with the end if there is none; generated tokens count as they
   come.
3. `prompt_tokens_by_source_total` counts tokens computed for prompts, repetitions after a preemption included.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.admission.admission import Limit
from app.admission.tenants import shown_name
from app.runtime import LONG_HOLD
from engine.frontend.request_stream import FinishedRequest, Observer
from engine.messages import FinishReason, RoutingStats, SchedulerStats, TierStats
from protocol.tools.unsupported import FAMILIES, family

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

# vLLM's buckets: a dashboard's quantiles stay comparable between the two.
TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
LOOP_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
WAIT_ERROR_BUCKETS: Final = (
    *(-60.0, -30.0, -20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1),
    *(0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
)
COUNT_BUCKETS: Final = (0, 1, 2, 5, 10, 20)
STEP_TOKEN_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

K = TypeVar("K", bound=str)
Loss = Literal["queue_full", "export_failed"]

ANONYMOUS: Final = "anonymous"  # the tenant of a server without keys
TIERS: Final = ("disk", "ram")

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics(Observer):
    """The counters of one server. Not thread-safe: call it from the event loop.

    No client can add a series: the values of each label are fixed here, except `handler`, a route's template, and
    `tenant`, one of `tenants`. docs/metrics.md lists them.
    """

    _loop_hold: WeightedHistogram

    def __init__(
        self, model_name: str, *, prefix: str = "vllm:", tenants: Iterable[str] = ("",), whole: Metrics | None = None
    ) -> None:
        """`whole` are the figures of a server of several models: then these are of one of them."""
        disable_created_metrics()  # a second series per counter
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._models: list[Metrics] = []
        self.name = model_name
        self._recent_first_tokens: deque[float] = deque(maxlen=1024)
        self._recent_rejections: Tally[str] = Tally()

        labels = ("model_name", "engine")
        values = (model_name, "0")

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=self._registry).labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=self._registry).labels(*values)

        def by(label: str, name: str, text: str, kinds: Iterable[K]) -> dict[K, Counter]:
            counters = Counter(prefix + name, text, (*labels, label), registry=self._registry)
            # All exist from the start, so that a rate begins at zero.
            return {kind: counters.labels(*values, str(kind)) for kind in kinds}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(prefix + name, text, labels, registry=self._registry, buckets=buckets).labels(*values)

        def weighted(name: str, text: str, buckets: tuple[float, ...]) -> WeightedHistogram:
            named = dict(zip(labels, values, strict=True))
            return WeightedHistogram(prefix + name, text, named, self._registry, buckets)

        self._running = gauge("num_requests_running", "Requests that are being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a running slot.")
        text = "Waiting requests: deferred until a grammar or blocks of a tier are there, or for want of capacity."
        by_reason = Gauge(prefix + "num_requests_waiting_by_reason", text, (*labels, "reason"), registry=self._registry)
        self._deferred, self._for_capacity = (by_reason.labels(*values, each) for each in ("deferred", "capacity"))
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks that requests own, 0 to 1.")
        self._preemptions = counter("num_preemptions", "Times a request was put back to make room.")
        self._cache_config = partial(
            CacheConfigCollector, prefix + "cache_config_info", dict(zip(labels, values, strict=True))
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Tokens that were generated for accepted requests.")
        self._cache_queries = counter(
            "prefix_cache_queries", "Tokens of starting and resumed requests looked up in the prefix cache."
        )
        self._cache_hits = counter(
            "prefix_cache_hits", "Tokens of starting and resumed requests that the prefix cache provided."
        )
        text = "Tokens of starting and resumed requests that the prefix cache did not have and a tier was asked for."
        self._tier_queries = counter("external_prefix_cache_queries", text)
        self._tier_hits = counter("external_prefix_cache_hits", "Tokens that a tier loaded into the prefix cache.")
        self._cached_tokens = counter("prompt_tokens_cached", "Cached prompt tokens of ended requests.")

        self._ttft = weighted("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = weighted("inter_token_latency_seconds", "Between two tokens of a request.", ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue_time = histogram("request_queue_time_seconds", "Arrival to first schedule.", REQUEST_BUCKETS)
        text = "First schedule to first token, of requests that got one."
        self._prefill_time = histogram("request_prefill_time_seconds", text, REQUEST_BUCKETS)
        self._decode_time = histogram("request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS)
        self._inference_time = histogram("request_inference_time_seconds", "First schedule to end.", REQUEST_BUCKETS)
        text = "Mean time between the tokens of a request's longest choice."
        self._mean_itl = histogram("request_time_per_output_token_seconds", text, ITL_BUCKETS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._request_output = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        text = "Output tokens of the longest choice of a request."
        self._request_longest = histogram("request_max_num_generation_tokens", text, TOKEN_BUCKETS)
        text = "Prompt tokens of a request that were computed, and not cached."
        self._request_computed = histogram("request_prefill_kv_computed_tokens", text, TOKEN_BUCKETS)
        text = "Times that a request was put back to make room."
        self._request_preemptions = histogram("request_num_preemptions", text, COUNT_BUCKETS)
        self._params_n = histogram("request_params_n", "The parameter n of a request.", COUNT_BUCKETS)
        text = "The limit of output tokens that a request sets, of those that set one."
        self._params_max_tokens = histogram("request_params_max_tokens", text, TOKEN_BUCKETS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BUCKETS)

        self._finished = by("finished_reason", "request_success", "Requests that ended, by reason.", FinishReason)
        text = "Tokens of choices that started or resumed, by where their keys and values came from."
        by_source = by("source", "prompt_tokens_by_source", text, ("local_compute", "local_cache_hit"))
        self._computed_tokens, self._reused_tokens = by_source.values()
        text = "Requests that were refused with 429, by the limit that refused them."
        self._rejections = by("reason", "admission_rejections", text, Limit)
        # Not vLLM's, so they have a name of their own whatever the prefix is.
        text = "Estimated seconds until all waiting requests have their first token."
        self._queued_seconds = Gauge("headrace:queued_seconds", text, registry=self._registry)
        text = "Seconds for which the engine has had work and made no step."
        self._stalled_seconds = Gauge("headrace:engine_stalled_seconds", text, registry=self._registry)
        text = "Wait of a request for its first token minus the expected wait."
        error = partial(WeightedHistogram, buckets=WAIT_ERROR_BUCKETS)
        self._wait_error = error("headrace:queue_wait_error_seconds", text, {}, self._registry)
        by_tier: Any = partial(Counter, labelnames=("tier",), registry=self._registry)
        self._tiers = {
            "hit_tokens": by_tier("headrace:kv_tier_hit_tokens", "Tokens that were loaded into the prefix cache."),
            "failed_loads": by_tier("headrace:kv_tier_failed_loads", "Chunks damaged, missing or of another model."),
            "loaded_bytes": by_tier("headrace:kv_tier_loaded_bytes", "Bytes that were loaded."),
            "load_seconds": by_tier("headrace:kv_tier_load_seconds", "Seconds of reading, checking and copying."),
            "stored_bytes": by_tier("headrace:kv_tier_stored_bytes", "Bytes that were stored."),
            "store_seconds": by_tier("headrace:kv_tier_store_seconds", "Seconds of writing, in parallel with steps."),
        }
        text = "Bytes in a tier of the KV cache when this server last looked."
        self._tier_bytes = Gauge("headrace:kv_tier_bytes", text, ("tier",), registry=self._registry)
        for tier in TIERS:
            self._on_tier(TierStats(tier=tier))
        text = "Copies of requests' states that the prefix cache keeps, of models with linear attention."
        self._checkpoints = Gauge("headrace:state_checkpoints", text, registry=self._registry)
        text = "Bytes of the kept copies of states."
        self._checkpoint_bytes = Gauge("headrace:state_checkpoint_bytes", text, registry=self._registry)
        text = "Starting and resumed requests that began from a kept copy of a state."
        self._checkpoint_hits = Counter("headrace:state_checkpoint_hits", text, registry=self._registry)
        self._num_checkpoint_hits = 0
        text = "Tokens routed to experts, counted once for each expert, by layer with experts."
        self._expert_tokens = Counter("headrace:expert_tokens", text, ("layer",), registry=self._registry)
        text = "Recent tokens of a layer's most loaded expert divided by the mean of all."
        self._expert_imbalance = Gauge("headrace:expert_imbalance", text, ("layer",), registry=self._registry)
        self._is_loaded = Gauge("headrace:model_loaded", "1 if the model is loaded.", registry=self._registry)
        text = "Estimated bytes of the loaded model: weights, KV cache and engine."
        self._memory = Gauge("headrace:model_memory_bytes", text, registry=self._registry)
        self._loads = Counter("headrace:model_loads", "Times the model was loaded.", registry=self._registry)
        text = "Times the model was unloaded, or its engine died."
        self._unloads = Counter("headrace:model_unloads", text, registry=self._registry)
        text = "Wait of a request for its model to be loaded, of those that waited."
        self._load_wait = WeightedHistogram("headrace:load_wait_seconds", text, {}, self._registry, REQUEST_BUCKETS)
        text = "Requests with tools that this server does not support, by the type of tool."
        tools = Counter("headrace:tools_left_out", text, ("type",), registry=self._registry)
        self._left_out = {kind: tools.labels(kind) for kind in FAMILIES}
        if whole is not None:
            self._loop_hold = whole._loop_hold
        else:
            self._shared = CollectorRegistry()
            self._make_shared(tenants)

    def of_model(self, name: str) -> Metrics:
        """Return the figures of one of several models, which `render` writes with these."""
        self._models.append(Metrics(name, prefix=self._prefix, whole=self))
        return self._models[-1]

    @property
    def by_model(self) -> list[Metrics]:
        """The figures of each model that had a request, or of the only one."""
        return [self] if self.name else self._models

    def totals(self) -> Totals:
        """Return what is kept of these figures for the dashboard's history, of this moment."""
        return Totals(
            generated=_value(self._generation_tokens),
            computed=_value(self._computed_tokens),
            refused={reason: count for reason, each in self._rejections.items() if (count := int(_value(each)))},
            ttft=tuple(self._ttft.counts),
            gaps=tuple(self._itl.counts),
            levels=(_value(self._running), _value(self._waiting), _value(self._kv_usage)),
        )

    def _make_shared(self, tenants: Iterable[str]) -> None:
        """Make the series of the whole server, which belong to no model."""
        ProcessCollector(registry=self._shared)
        PlatformCollector(registry=self._shared)
        GCCollector(registry=self._shared)
        # For gateways that route by adapter; no adapters are served here.
        text = "LoRA adapters that requests run with or wait for, as labels; the value is a Unix time."
        adapters = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        lora = Gauge(self._prefix + "lora_requests_info", text, adapters, registry=self._shared)
        lora.labels("0", "", "").set_to_current_time()
        text = "How late the event loop woke a task that slept for 50 ms."
        self._loop_lag = WeightedHistogram("headrace:event_loop_lag_seconds", text, {}, self._shared, LOOP_BUCKETS)
        text = "Processor time for which a request, or a delivery of outputs, held the event loop without a break."
        self._loop_hold = WeightedHistogram("headrace:event_loop_hold_seconds", text, {}, self._shared, LOOP_BUCKETS)
        text = "1 for the server's phase: starting, ready, leaving, stopping or failed."
        self._phase = Gauge("headrace:phase", text, ("phase",), registry=self._shared)
        self._by_tenant = CollectorRegistry()
        text = "Requests of a tenant that were answered, by status class; 429 (refused) has one of its own."
        self._tenant_requests = Counter(
            "headrace:tenant_requests", text, ("tenant", "status"), registry=self._by_tenant
        )
        text = "Tokens of a tenant's requests that ended."
        self._tenant_tokens = Counter("headrace:tenant_tokens", text, ("tenant", "kind"), registry=self._by_tenant)
        self._tenants: dict[str, tuple[dict[str, Counter], Counter, Counter]] = {}
        self._waiting_of: Callable[[str], int] = lambda tenant: 0
        text = "Choices of a tenant that wait for their first token."
        self._tenant_waiting = Gauge("headrace:tenant_waiting", text, ("tenant",), registry=self._by_tenant)
        self.set_tenants(tenants)
        text = "Sampled traces that did not reach the collector, by reason."
        lost = Counter("headrace:lost_traces", text, ("reason",), registry=self._shared)
        self._lost_traces = {reason: lost.labels(reason) for reason in get_args(Loss)}
        self._http = Counter(
            "http_requests",
            "HTTP requests by route, method and status class.",
            ("handler", "method", "status"),
            registry=self._shared,
        )

    def on_load(self, num_bytes: int) -> None:
        """Count a load of the model, which takes so many bytes from now on."""
        self._loads.inc()
        self._is_loaded.set(1)
        self.on_memory(num_bytes)

    def on_memory(self, num_bytes: int) -> None:
        """Show the bytes that the loaded model takes."""
        self._memory.set(num_bytes)

    def on_unload(self) -> None:
        """Count the end of a loaded model, whatever the cause."""
        self._unloads.inc()
        waiting = (self._waiting, self._deferred, self._for_capacity)
        for level in (self._is_loaded, self._memory, self._running, *waiting, self._kv_usage):
            level.set(0)

    def on_load_wait(self, seconds: float) -> None:
        """Record the seconds for which a request has waited for the model to be loaded."""
        self._load_wait.observe(seconds)

    def on_step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._deferred.set(stats.num_deferred)
        self._for_capacity.set(stats.num_waiting - stats.num_deferred)
        self._kv_usage.set(stats.kv_cache_usage)
        if stats.prompt_tokens:
            self._computed_tokens.inc(stats.prompt_tokens)
        if generated_tokens:
            self._generation_tokens.inc(generated_tokens)
        if stats.prefix_cache_queries:
            self._cache_queries.inc(stats.prefix_cache_queries)
            self._cache_hits.inc(stats.prefix_cache_hits)
            self._reused_tokens.inc(stats.prefix_cache_hits)
            self._tier_queries.inc(stats.tier_misses)
        if stats.num_preemptions:
            self._preemptions.inc(stats.num_preemptions)
        self.on_expert_load(stats.expert_load or ())
        for tier in stats.tiers or ():
            self._on_tier(tier)
        if stats.checkpoints is not None:
            self._checkpoints.set(stats.checkpoints.count)
            self._checkpoint_bytes.set(stats.checkpoints.num_bytes)
            # An engine that was started again counts from zero.
            self._checkpoint_hits.inc(max(0, stats.checkpoints.hits - self._num_checkpoint_hits))
            self._num_checkpoint_hits = stats.checkpoints.hits
        if stats.computed_tokens:
            self._step_tokens.observe(stats.computed_tokens)

    def on_expert_load(self, layers: Iterable[tuple[int, float]]) -> None:
        """Count the tokens of each layer's experts, with the load of the most loaded expert divided by the mean."""
        for layer, (tokens, imbalance) in enumerate(layers):
            self._expert_tokens.labels(layer).inc(tokens)
            self._expert_imbalance.labels(layer).set(imbalance)

    def _on_tier(self, stats: TierStats) -> None:
        for field, counter in self._tiers.items():
            counter.labels(stats.tier).inc(getattr(stats, field))
        self._tier_bytes.labels(stats.tier).set(stats.num_bytes)
        self._tier_queries.inc(stats.hit_tokens)
        self._tier_hits.inc(stats.hit_tokens)

    def on_prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def on_rejection(self, limit: Limit) -> None:
        """Count a request that was refused because a queue is full. It is in no other metric."""
        self._rejections[limit].inc()
        self._recent_rejections[limit] += 1

    def on_waited(self, waited: float, expected: float) -> None:
        """Record a request's seconds until its first token, and the estimate of them."""
        self._wait_error.observe(waited - expected)

    def show(
        self,
        queued_seconds: Callable[[], float],
        stalled_seconds: Callable[[], float],
        waiting: Callable[[str], int],
        phases: Iterable[str],
        is_in: Callable[[str], bool],
        routing: Callable[[], RoutingStats | None] = lambda: None,
        cache_config: Callable[[], Mapping[str, str] | None] = lambda: None,
    ) -> None:
        """Set the functions that are called at each scrape: seconds of queued work, seconds in which the engine made no
        step, waiting choices of a tenant, whether the server is in a phase, the routing between engines, and the
        labels of the KV cache, None before a model is loaded."""
        self._registry.register(RoutingCollector(routing))
        self._registry.register(self._cache_config(cache_config))
        self._queued_seconds.set_function(queued_seconds)
        self._stalled_seconds.set_function(stalled_seconds)
        self._waiting_of = waiting
        for phase in phases:
            self._phase.labels(phase).set_function(partial(is_in, phase))

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)
        self._recent_first_tokens.append(seconds)

    def take_recent(self) -> tuple[list[float], dict[str, int]]:
        """Return and clear: latest TTFTs in seconds (at most 1,024), refusals per limit."""
        recent = list(self._recent_first_tokens), dict(self._recent_rejections)
        self._recent_first_tokens.clear()
        self._recent_rejections.clear()
        return recent

    def on_inter_token(self, seconds: float, count: int = 1) -> None:
        """Record `count` tokens, each `seconds` after the previous token of its choice."""
        self._itl.observe(seconds, count)

    def on_request_finished(self, finished: FinishedRequest) -> None:
        self._finished[finished.reason].inc()
        self._request_prompt.observe(finished.prompt_tokens)
        self._request_output.observe(finished.output_tokens)
        self._request_longest.observe(finished.longest_output)
        self._e2e.observe(finished.e2e_seconds)
        self._request_computed.observe(finished.prompt_tokens - finished.cached_tokens)
        self._request_preemptions.observe(finished.num_preemptions)
        self._params_n.observe(finished.num_choices)
        if finished.max_tokens:
            self._params_max_tokens.observe(finished.max_tokens)
        if finished.cached_tokens:
            self._cached_tokens.inc(finished.cached_tokens)
        if finished.queue_seconds is not None:
            self._queue_time.observe(finished.queue_seconds)
        if finished.prefill_seconds is not None and finished.decode_seconds is not None:
            self._prefill_time.observe(finished.prefill_seconds)
            self._decode_time.observe(finished.decode_seconds)
            self._inference_time.observe(finished.prefill_seconds + finished.decode_seconds)
            if finished.longest_output > 1:
                self._mean_itl.observe(finished.decode_seconds / (finished.longest_output - 1))

    def set_tenants(self, names: Iterable[str], busy: Collection[str] = ()) -> None:
        """Count these tenants from now on. Drop the series of others; the next call drops those that are `busy` now."""
        names = set(names)
        for name in self._tenants.keys() - names - set(busy):
            label = shown_name(name) or ANONYMOUS
            for status in self._tenants.pop(name)[0]:
                self._tenant_requests.remove(label, status)
            for kind in ("prompt", "generation"):
                self._tenant_tokens.remove(label, kind)
            self._tenant_waiting.remove(label)
        for name in names - self._tenants.keys():
            label = shown_name(name) or ANONYMOUS
            requests = {status: self._tenant_requests.labels(label, status) for status in ("2xx", "4xx", "429", "5xx")}
            tokens = partial(self._tenant_tokens.labels, label)
            self._tenants[name] = (requests, tokens("prompt"), tokens("generation"))
            self._tenant_waiting.labels(label).set_function(partial(self._num_waiting, name))

    def _num_waiting(self, tenant: str) -> int:
        return self._waiting_of(tenant)

    def on_tenant(self, tenant: str, status: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that was answered with `status`, unless it is an administrator's."""
        if tenant not in self._tenants:
            return
        requests, prompt, output = self._tenants[tenant]
        if (counter := requests.get(str(status)) or requests.get(f"{status // 100}xx")) is not None:
            counter.inc()
        prompt.inc(prompt_tokens)
        output.inc(output_tokens)

    def on_tools_left_out(self, types: Iterable[str]) -> None:
        """Count a request with unsupported tools, which are dropped, of these types."""
        for kind in {family(each) for each in types}:
            self._left_out[kind].inc()

    def on_lost_traces(self, reason: Loss, count: int) -> None:
        """Count lost traces. May be called by any thread."""
        self._lost_traces[reason].inc(count)

    def on_http_request(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP request that was answered. `handler` is the route's template, never a client's path."""
        self._http.labels(handler, method if method in _METHODS else "OTHER", f"{status // 100}xx").inc()

    def on_loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def on_loop_hold(self, seconds: float, by: str, request_id: str | None = None) -> None:
        """Record processor time for which the event loop ran nothing else. `by` names a route or another cause."""
        self._loop_hold.observe(seconds)
        if seconds >= LONG_HOLD:
            logger.warning("%s held the event loop for %.3f s (request %s)", by, seconds, request_id or "-")

    def on_delivery(self, seconds: float) -> None:
        self.on_loop_hold(seconds, "a delivery of outputs")

    def render(self, *, by_tenant: bool = True) -> bytes:
        """Return the body of `/metrics`, of type `CONTENT_TYPE`, with the tenants' series if `by_tenant`."""
        models: Any = _SeveralModels({each.name: each._registry for each in self._models}) if self._models else None
        page = generate_latest(self._shared) + generate_latest(models or self._registry)
        return page + (generate_latest(self._by_tenant) if by_tenant else b"")


class Totals(NamedTuple):
    """Counts since the start, and levels of one moment. A histogram is the number of values in each bucket."""

    generated: float = 0.0  # tokens
    computed: float = 0.0  # prompt tokens
    refused: Mapping[str, int] = {}  # requests by reason
    ttft: Sequence[int] = (0,) * (len(TTFT_BUCKETS) + 1)
    gaps: Sequence[int] = (0,) * (len(ITL_BUCKETS) + 1)  # between tokens
    levels: tuple[float, float, float] = (0.0, 0.0, 0.0)  # running, waiting, share of KV blocks that are owned


def _value(metric: Counter | Gauge) -> float:
    return next(iter(metric.collect())).samples[0].value


class _SeveralModels:
    """The series of several models as one registry: each family once, with the name of the model as a label."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, registry in self._registries.items():
            for found in registry.collect():
                merged = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                merged.samples += [
                    sample._replace(labels={"model_name": name, **sample.labels}) for sample in found.samples
                ]
        return families.values()


# ------------------------------------------------------------------------------------------------------ routing metrics
# The metrics of several engines, read at each scrape.


class RoutingCollector(Collector):
    """The metrics of the routing between engines, read at each scrape. Zeros if there is one engine."""

    def __init__(self, read: Callable[[], RoutingStats | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read() or RoutingStats()
        load = GaugeMetricFamily(
            "headrace:engine_load_seconds", "Seconds of work that waits or runs in an engine.", None, ["engine"]
        )
        for engine, seconds in enumerate(stats.loads or (0.0,)):
            load.add_metric([str(engine)], seconds)
        yield load
        routed = CounterMetricFamily(
            "headrace:routed_prompts", "Prompts given to one of several engines, by reason.", None, ["reason"]
        )
        routed.add_metric(["prefix"], stats.num_by_prefix)
        routed.add_metric(["load"], stats.num_by_load)
        yield routed
        text = "Waiting requests given to another engine because theirs had died."
        yield CounterMetricFamily("headrace:requests_placed_again", text, stats.num_placed_again)
        yield GaugeMetricFamily("headrace:engines", "Engines that run.", stats.num_engines)
        text = "Times that an engine has died and was restarted."
        yield CounterMetricFamily("headrace:engine_deaths", text, stats.num_deaths)
        text = "Engines that do not publish the contents of their prefix cache, which are guessed."
        yield GaugeMetricFamily("headrace:engines_with_guessed_cache", text, stats.num_guessed)
        yield CounterMetricFamily(
            "headrace:kv_event_gaps", "Times that KV events of an engine were lost.", stats.num_gaps
        )
        text = "Approximate memory of the index of the engines' prefix caches."
        yield GaugeMetricFamily("headrace:routing_bytes", text, stats.num_bytes)


class CacheConfigCollector(Collector):
    """The metric of the KV cache's division, read at each scrape because engines come and go. Empty before the model is
    loaded."""

    def __init__(self, name: str, labels: Mapping[str, str], read: Callable[[], Mapping[str, str] | None]) -> None:
        self._name, self._labels, self._read = name, labels, read

    def collect(self) -> Iterator[Metric]:
        text = "The division of the KV cache, as labels; 1 once the model is loaded."
        found = self._read()
        labels = {} if found is None else {**self._labels, **found}
        family = GaugeMetricFamily(self._name, text, None, list(labels))
        if labels:
            family.add_metric(list(labels.values()), 1)
        yield family


# ------------------------------------------------------------------------------------------------------------ histogram
# A histogram that takes many equal values at once.
#
# prometheus-client's own takes one value per call, at about two microseconds. There is an inter-token latency for every
# token, but most tokens of one step share it. Used on the event loop only.


class WeightedHistogram(Collector):
    """One series with constant labels. `buckets` are upper bounds in ascending order, infinity not among them."""

    def __init__(
        self, name: str, text: str, labels: dict[str, str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = list(buckets)
        self.counts = [0] * (len(buckets) + 1)  # of the values in each bucket, the last without a bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Record the same value `count` times. A bucket holds values up to and including its bound."""
        self.counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram for the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        cumulative, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self.counts, strict=True):
            cumulative += count
            buckets.append((floatToGoString(bound), float(cumulative)))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
