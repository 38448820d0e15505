"""A trace per request, for the question that metrics cannot answer: why was this one slow?

Optional: with `otlp_endpoint` unset nothing of OpenTelemetry is imported and `open_tracer` gives a tracer that does
nothing. With it set, the extra `otel` must be installed. `app` records a request once, after it has ended, from the
timestamps that it holds anyway; so tracing costs nothing while tokens flow, and an aborted request is traced like any
other. The caller's W3C `traceparent` is honoured, its sampling decision included.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from app.request_record import RequestRecord
from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


class Tracer(Protocol):
    """Records requests."""

    def record(self, record: RequestRecord) -> None:
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

    def record(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        # Spans want the time of day; a request is timed by a clock that never jumps.
        to_epoch = time.time_ns() - time.monotonic_ns()

        def ns(seconds: float) -> int:
            return int(seconds * 1e9) + to_epoch

        headers = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        parent = self._propagator.extract({name: value for name, value in headers.items() if value})
        span = self._tracer.start_span(
            record.route,
            context=parent,
            kind=SpanKind.SERVER,
            start_time=ns(record.arrival_time),
            attributes=_attributes(record),
        )
        context = set_span_in_context(span)
        for name, start, end in _phases(record):
            self._tracer.start_span(name, context=context, start_time=ns(start)).end(end_time=ns(end))
        span.end(end_time=ns(record.ended_time))

    def close(self) -> None:
        self._provider.shutdown()


class _NoTracer:
    def record(self, record: RequestRecord) -> None:
        pass

    def close(self) -> None:
        pass


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Queue, prefill and decode as (name, start, end), as far as the request got."""
    marks = [record.arrival_time, record.first_scheduled_time, record.first_token_time]
    reached = [mark for mark in marks if mark is not None]
    ends = [*reached[1:], record.ended_time]
    return list(zip(("queue", "prefill", "decode"), reached, ends, strict=False))


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI where it has one."""
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "headrace.cached_tokens": record.num_cached_tokens,
    }
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (record.finish_reason,)
    if record.seconds_to_first_token is not None:
        attributes["gen_ai.server.time_to_first_token"] = record.seconds_to_first_token
    return attributes
