"""A trace per request, for the question that metrics cannot answer: why was this one slow?

Optional: with `otlp_endpoint` unset nothing of OpenTelemetry is imported and `open_tracer` gives a tracer that does
nothing. With it set, the extra `otel` must be installed. `app` records a request once, after it has ended, from the
timestamps that it holds anyway; so tracing costs nothing while tokens flow, and an aborted request is traced like any
other. The caller's W3C `traceparent` is honoured, its sampling decision included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """What is known of a request when it has ended. Times are `time.monotonic()`; None: it never got there."""

    name: str  # the route: "/v1/chat/completions"
    request_id: str
    model: str
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    traceparent: str | None = None
    tracestate: str | None = None


class Tracer(Protocol):
    """Records requests."""

    def record(self, trace: RequestTrace) -> None:
        """Hand over one ended request. Never blocks and never raises; exporting happens on a thread of its own."""
        ...

    def close(self) -> None:
        """Export what is left. Blocks for up to some seconds: call it in a worker thread."""
        ...


def open_tracer(settings: Settings) -> Tracer:
    """The tracer that the settings ask for. Raises `SettingsError` when its packages are not installed."""
    if settings.otlp_endpoint is None:
        return _NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"otlp_endpoint is {settings.otlp_endpoint!r}, but {error.name} is not installed. "
            "Install it (pip install 'headrace[otel]') or leave otlp_endpoint unset."
        ) from error
    return SpanTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint)))


class SpanTracer:
    """Turns each request into a span with the children queue, prefill and decode."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not the global provider: two servers in one process keep apart, and so do tests.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "headrace"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        # Spans want the time of day; a request is timed by a clock that never jumps.
        to_epoch = time.time_ns() - time.monotonic_ns()

        def ns(seconds: float) -> int:
            return int(seconds * 1e9) + to_epoch

        headers = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = self._propagator.extract({name: value for name, value in headers.items() if value})
        span = self._tracer.start_span(
            trace.name,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=ns(trace.arrival),
            attributes=_attributes(trace),
        )
        context = set_span_in_context(span)
        for name, start, end in _phases(trace):
            self._tracer.start_span(name, context=context, start_time=ns(start)).end(end_time=ns(end))
        span.end(end_time=ns(trace.finished))

    def close(self) -> None:
        self._provider.shutdown()


class _NoTracer:
    def record(self, trace: RequestTrace) -> None:
        pass

    def close(self) -> None:
        pass


def _phases(trace: RequestTrace) -> list[tuple[str, float, float]]:
    """Queue, prefill and decode as (name, start, end), as far as the request got."""
    marks = [trace.arrival, trace.first_scheduled, trace.first_token]
    reached = [mark for mark in marks if mark is not None]
    ends = [*reached[1:], trace.finished]
    return list(zip(("queue", "prefill", "decode"), reached, ends, strict=False))


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI where it has one."""
    attributes: dict[str, Any] = {
        "gen_ai.request.id": trace.request_id,
        "gen_ai.response.model": trace.model,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "headrace.cached_tokens": trace.cached_tokens,
    }
    if trace.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (trace.finish_reason,)
    if trace.first_token is not None:
        attributes["gen_ai.server.time_to_first_token"] = trace.first_token - trace.arrival
    return attributes
