"""Requests as OpenTelemetry spans.

1. OpenTelemetry's environment variables apply unless a setting overrides them: endpoint, headers, timeout and
   compression of the exporter, service name and resource, sampler, limits of the queue.
2. The queue takes whole traces: while it is full because the collector is slow or gone, a request is not traced and is
   counted as lost.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SpanOfSdk
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.config.settings import Settings
from app.http.record import AccessRecord, Phase
from app.http.scope import RequestScope
from app.observability.logs import bind
from app.observability.metrics import Loss
from engine.frontend.request_stream import RequestStream
from engine.messages import EventKind, RequestEvent

CLOSE_SECONDS: Final = 3.0  # for what is left when the server ends
MOST_SPANS: Final = 256  # of one request
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class SpanTracer:
    """The tracer that makes a span of kind server for each request, with a child span for each phase."""

    def __init__(self, settings: Settings, on_lost: Callable[[Loss, int], None]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of each retry, and of clients' headers
        self._on_lost = on_lost
        self._exporter = _CountingExporter(OTLPSpanExporter(_with_path(settings.otlp_endpoint)), on_lost)
        self._num_made = 0
        given = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "")
        size = int(given) if given.isdigit() else 2048
        self._room = max(size - MOST_SPANS, size // 2)
        self._processor = BatchSpanProcessor(self._exporter)
        # Not the global provider, so that two servers in one process, as in tests, stay separate.
        provider = TracerProvider(
            resource=Resource.create({"service.name": PROVIDER, **OTELResourceDetector().detect().attributes}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("headrace", schema_url=SCHEMA_URL)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request: RequestScope, route: str) -> None:
        parent = (
            self._propagator.extract(_carrier(request.asgi_scope["headers"]), Context())
            if request.span is None  # else a background response, a child of the request that started it
            else set_span_in_context(request.span, Context())
        )
        # The time of day is read once, because it may jump; the request is timed by the monotonic clock.
        start = time.time_ns() - time.monotonic_ns() + int(request.arrival_time * 1e9)
        name = f"{request.method} {route}"
        request.span = span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=start)
        ids = span.get_span_context()
        bind(trace_id=format_trace_id(ids.trace_id), span_id=format_span_id(ids.span_id))

    def end(self, request: RequestScope, record: AccessRecord) -> None:
        root = request.span
        if not isinstance(root, SpanOfSdk) or root.start_time is None:
            return  # the request is not sampled
        if self._num_made - self._exporter.num_taken > self._room:
            self._on_lost("queue_full", 1)
            return
        zero = root.start_time - int(request.arrival_time * 1e9)
        inside = set_span_in_context(root, Context())

        def start_span(name: str, start: float, parent: Context) -> Span:
            self._num_made += 1
            return self._tracer.start_span(name, parent, start_time=zero + int(start * 1e9))

        for phase in phases(request.marks, request.outputs, record.ended_time):
            child = start_span(phase.phase, phase.start, inside)
            for choice, event in phase.events:
                child.add_event(event.kind, {TOKENS: event.tokens, CHOICE: choice}, zero + int(event.time * 1e9))
            for since, until in request.blocked:
                start, end = max(since, phase.start), min(until, phase.end)
                if start < end:
                    blocked = start_span(BLOCKED_ON_CLIENT, start, set_span_in_context(child, Context()))
                    blocked.end(zero + int(end * 1e9))
            child.end(zero + int(phase.end * 1e9))
        attributes = _attributes(request, record)
        root.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if request.transcript is not None:
            root.set_attributes(request.transcript.attributes())
        if max(record.status, request.error_status or 0) >= 500:  # the others are not the server's fault
            root.set_status(StatusCode.ERROR)
        self._num_made += 1
        root.end(zero + int(record.ended_time * 1e9))

    def close(self) -> None:
        # `shutdown` may wait for a collector for minutes, so it runs in a thread.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _CountingExporter(SpanExporter):
    """Counts the spans taken out of the queue, and the traces that were lost (each by its request span)."""

    def __init__(self, exporter: SpanExporter, on_lost: Callable[[Loss, int], None]) -> None:
        self.num_taken = 0  # spans; written by the exporting thread alone
        self._exporter = exporter
        self._on_lost = on_lost

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._on_lost("export_failed", sum(span.kind is SpanKind.SERVER for span in spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _with_path(endpoint: str | None) -> str | None:
    """Return a collector's URL, with the usual path if it has none; None leaves it to the environment."""
    if endpoint is None or urlsplit(endpoint).path.strip("/"):
        return endpoint
    return endpoint.rstrip("/") + "/v1/traces"


def _carrier(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Return W3C's trace headers. A repeated `traceparent` is ignored; `tracestate` lists are joined."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            found[name.decode()].append(value.decode("latin-1"))
    return found if len(found["traceparent"]) == 1 else {}


def _attributes(request: RequestScope, record: AccessRecord) -> dict[str, Any]:
    """Return the attributes of a request's span; those that are None do not apply. Times are in seconds."""
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "url.path": record.path,
        "url.scheme": request.asgi_scope["scheme"],
        "network.protocol.version": request.http_version,
        "http.response.status_code": request.status,
        "error.type": record.error or ("client_gone" if request.client_gone else None),
        "headrace.request_id": record.request_id,
        "headrace.blocked_on_client_seconds": sum(until - since for since, until in request.blocked) or None,
    }
    outputs = request.outputs
    if outputs is None:
        return attributes
    operation = _OPERATIONS.get(record.route, "chat")
    attributes |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": request.answer_id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
    }
    if operation == "embeddings":
        return attributes  # nothing is sampled
    sampling = outputs.sampling
    return attributes | {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.response.finish_reasons": record.finish_reason and [record.finish_reason],
        "gen_ai.server.time_to_first_token": record.seconds_to_first_token,
    }


# ---------------------------------------------------------------------------------------------------------- trace names
# The names in traces. `gen_ai.*`, `http.*`, `url.*`, `network.*` and `error.type` are names of OpenTelemetry's semantic
# conventions 1.41.0, the last version with `gen_ai.*`. In their new repository those names still change, so they are
# pinned to 1.41.0 here. Names that the conventions lack begin with `headrace.`.


SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
PROVIDER: Final = "headrace"
BLOCKED_ON_CLIENT: Final = "blocked_on_client"
TOKENS: Final = "headrace.tokens"  # of an event
CHOICE: Final = "headrace.choice"


# --------------------------------------------------------------------------------------------------------------- phases
# The phases of a request from its arrival to its end. They follow each other without a gap, so they add up.
#
# A phase is what the answer waits for. With several choices it is the phase of the choice furthest along: a choice that
# decodes hides another that waits. The engine continues while the client does not read, so its phases count until it is
# done; the times at which sending was blocked are separate (`RequestScope.blocked`).


MAX_SPANS: Final = 64  # of one request in the engine; further phases are part of the last span
MAX_EVENTS: Final = 64  # of one span
_IN_ENGINE: Final = (
    *(Phase.DECODE, Phase.PREFILL, Phase.LOAD_KV, Phase.WAIT_FOR_GRAMMAR, Phase.PREEMPTED, Phase.QUEUE, Phase.ENDED),
)
_AT_THE_END: Final = frozenset(EventKind) - {EventKind.SCHEDULED, EventKind.LOADING, EventKind.WAITS_FOR_GRAMMAR}


@dataclass(slots=True)
class PhaseSpan:
    """One phase of a request. Times are `time.monotonic()`; `events` are the engine's, with the number of the
    choice."""

    phase: Phase
    start: float
    end: float = math.inf
    events: list[tuple[int, RequestEvent]] = field(default_factory=list)


def phases(marks: Sequence[tuple[Phase, float]], outputs: RequestStream | None, end: float) -> list[PhaseSpan]:
    """Return the phases of a request that ended at `end`. `marks` are the phases before the engine's with the time when
    each began, the first at the arrival; `outputs` is None if the engine never got the request."""
    spans = [PhaseSpan(phase, begin) for phase, begin in marks]
    if outputs is not None:
        spans += _in_engine(outputs)
        if outputs.finished_time is not None:
            spans.append(PhaseSpan(Phase.DELIVER, outputs.finished_time))
    for span, following in pairwise([*spans, PhaseSpan(Phase.ENDED, end)]):
        # A clock read by another thread may be a little ahead.
        span.end = following.start = min(max(span.start, following.start), end)
    return [span for span in spans if span.end > span.start]


def _in_engine(outputs: RequestStream) -> list[PhaseSpan]:
    num_choices = len(outputs.child_ids)
    missing = [length for length in outputs.prompt_lengths for _ in range(num_choices // len(outputs.prompt_lengths))]
    states = [Phase.QUEUE] * num_choices
    num_in = Counter(states)
    spans = [PhaseSpan(Phase.QUEUE, outputs.opened_time)]
    for choice, event in sorted(outputs.events, key=lambda each: each[1].time):
        before = spans[-1]
        match event.kind:
            case EventKind.SCHEDULED | EventKind.PREFILL:
                missing[choice] -= event.tokens
                state = Phase.PREFILL if missing[choice] > 0 or outputs.first_token_time is None else Phase.DECODE
            case EventKind.PREEMPTED:
                missing[choice] = event.tokens
                state = Phase.PREEMPTED
            case EventKind.LOADING:
                state = Phase.LOAD_KV
            case EventKind.WAITS_FOR_GRAMMAR:
                state = Phase.WAIT_FOR_GRAMMAR
            case EventKind.FINISHED:
                state = Phase.ENDED
            case _:
                state = Phase.QUEUE
        num_in[states[choice]] -= 1
        num_in[state] += 1
        states[choice] = state
        phase = next(each for each in _IN_ENGINE if num_in[each])
        if phase is not before.phase and len(spans) < MAX_SPANS:
            spans.append(PhaseSpan(phase, event.time))
        told = before if event.kind in _AT_THE_END else spans[-1]
        if len(told.events) < MAX_EVENTS:
            told.events.append((choice, event))
    return spans
