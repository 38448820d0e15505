"""A trace per request, for the question that metrics cannot answer: why was this one slow?

Optional: unless `otlp_endpoint` or OpenTelemetry's own environment variables name a collector, nothing of OpenTelemetry
is imported and `open_tracer` gives a tracer that does nothing. A request's span begins with its trace context and the
decision whether it is sampled; all else is made of timestamps when it has ended, however it ended. So tracing costs
nothing while tokens flow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

from app.metrics import Loss
from app.request_record import RequestRecord
from app.scope import RequestScope
from app.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracer(Protocol):
    """Traces requests. Never blocks and never raises; exporting happens on a thread of its own."""

    def begin(self, request: RequestScope, route: str) -> None:
        """A request has come. From now on its log lines have the ids of its trace and span."""
        ...

    def end(self, request: RequestScope, record: RequestRecord) -> None:
        """It has ended."""
        ...

    def close(self) -> None:
        """Export what is left. Blocks for up to some seconds: call it in a worker thread."""
        ...


class NoTracer:
    """Traces nothing."""

    def begin(self, request: RequestScope, route: str) -> None:
        pass

    def end(self, request: RequestScope, record: RequestRecord) -> None:
        pass

    def close(self) -> None:
        pass


def open_tracer(settings: Settings, on_lost: Callable[[Loss, int], None]) -> Tracer:
    """The tracer that settings and environment ask for. `on_lost` is told how many traces were lost and why, by any
    thread. Raises `SettingsError` if `otlp_endpoint` is set and its packages are not installed, and if a tracing
    setting is set without a collector."""
    environment = os.environ
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    if is_off:
        return NoTracer()
    if settings.otlp_endpoint is None and not any(map(environment.get, _ENDPOINTS)):
        _refuse_settings_without_effect(settings)
        return NoTracer()
    try:
        from app.span_tracer import SpanTracer
    except ImportError as error:
        missing = f"{error.name} is not installed. Install it (pip install '.[otel]' in a clone of Headrace)"
        if settings.otlp_endpoint is not None:
            raise SettingsError(f"otlp_endpoint is set, but {missing} or leave otlp_endpoint unset.") from error
        # The environment may be meant for everything in a cluster.
        logger.warning("The environment names a collector of traces, but %s; nothing is traced", missing)
        return NoTracer()
    try:
        return SpanTracer(settings, on_lost)
    except ValueError as error:
        raise SettingsError(f"OpenTelemetry cannot be set up as its environment variables say: {error}") from error


def _refuse_settings_without_effect(settings: Settings) -> None:
    fields = type(settings).model_fields
    for name in ("trace_messages", "trace_sample_ratio"):
        if getattr(settings, name) != fields[name].default:
            raise SettingsError(
                f"{name} has no effect without a collector of traces. What works: otlp_endpoint = "
                f"http://127.0.0.1:4318, or {name} left out"
            )
