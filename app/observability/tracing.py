"""The choice of a tracer, and the timelines of the last requests.

1. Unless `otlp_endpoint` or OpenTelemetry's own environment variables name a collector, no module of OpenTelemetry is
   imported and `open_tracer` returns a tracer that does nothing.
2. Tracing costs nothing while tokens flow: when a request arrives, only its trace context and the sampling decision are
   read; its spans are made from timestamps after its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import orjson

from app.config.settings import Settings, SettingsError
from app.http.record import AccessRecord
from app.http.scope import RequestScope
from app.observability.metrics import Loss
from engine.fairness import TenantLRU

if TYPE_CHECKING:
    from app.observability.spans import SpanTracer

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class NoTracer:
    """The tracer that does nothing, with the methods of `SpanTracer`. None of them blocks or raises, except `close`."""

    def begin(self, request: RequestScope, route: str) -> None:
        """Begin the trace of a request, and add the ids of trace and span to its log lines."""

    def end(self, request: RequestScope, record: AccessRecord) -> None:
        """Make the spans of a request that has ended."""

    def close(self) -> None:
        """Export the spans in the queue. Blocks for up to some seconds: call it in a worker thread."""


def open_tracer(settings: Settings, on_lost: Callable[[Loss, int], None]) -> NoTracer | SpanTracer:
    """Return the tracer that settings and environment ask for. `on_lost` is called with the reason and number of lost
    traces, by any thread. Raises `SettingsError` if `otlp_endpoint` is set and its packages are not installed, and if
    `trace_messages` is set without a collector."""
    environment = os.environ
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    if is_off:
        return NoTracer()
    if settings.otlp_endpoint is None and not any(map(environment.get, _ENDPOINTS)):
        if settings.trace_messages:
            raise SettingsError(
                "trace_messages has no effect without a collector of traces. What works: otlp_endpoint = "
                "http://127.0.0.1:4318, or trace_messages left out"
            )
        return NoTracer()
    try:
        from app.observability.spans import SpanTracer
    except ImportError as error:
        missing = f"{error.name} is not installed. Install it (pip install '.[otel]' in a clone of Headrace)"
        if settings.otlp_endpoint is not None:
            raise SettingsError(f"otlp_endpoint is set, but {missing} or leave otlp_endpoint unset.") from error
        # Not an error, because the environment may be set for all programs of a cluster.
        logger.warning("The environment names a collector of traces, but %s; nothing is traced", missing)
        return NoTracer()
    try:
        return SpanTracer(settings, on_lost)
    except ValueError as error:
        raise SettingsError(f"OpenTelemetry cannot be set up as its environment variables say: {error}") from error


# ------------------------------------------------------------------------------------------------------------ timelines
# Timelines of the last requests, which show why a request was slow.
#
# The segments follow each other without a gap, so they add up to the request's time: `receive` (body), `tokenize`
# (validation, template, tokens), `queue`, `prefill`, `decode`, `deliver` (until the client has everything). Events are
# the engine's. Timelines of the last `timeline_size` requests are kept in memory, fewer if they have many events. A
# tenant sees only its own, and a tenant with many requests displaces its own timelines first.


BYTES_PER_TIMELINE: Final = 8 * 1024  # on average; most have some 1,500
LEAST_BYTES: Final = 2**20  # for all of them


class Timelines:
    """The timelines of ended requests, as JSON. The tenant with the most timelines loses its oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: TenantLRU[bytes] = TenantLRU(size, max(LEAST_BYTES, BYTES_PER_TIMELINE * size))

    def keep(self, request: RequestScope, status: int, end: float) -> None:
        """Keep the timeline of a generation request that ended at `end`."""
        if self._size:
            entry = orjson.dumps(timeline(request, status, end))
            self._kept.keep(request.tenant.name, request.request_id, entry, len(entry))

    def find(self, request_id: str, tenant: str) -> bytes | None:
        """Return the timeline of a tenant's own request as JSON; None if it is not kept."""
        return self._kept.find(tenant, request_id)


def timeline(request: RequestScope, status: int, end: float) -> dict[str, Any]:
    """Return the timeline of a request that ended at `end`. Times are seconds since its arrival."""
    start = request.arrival_time
    outputs = request.outputs
    begins = [("receive", start), ("tokenize", request.received_time)]
    if outputs is not None:
        begins += [
            ("queue", outputs.opened_time),
            ("prefill", outputs.first_scheduled_time),
            ("decode", outputs.first_token_time),
            ("deliver", outputs.finished_time),
        ]
    reached = [(name, begin) for name, begin in begins if begin is not None]
    ends = [*(begin for _, begin in reached[1:]), end]
    return {
        "id": request.request_id,
        "status": status,
        "finish_reason": outputs and outputs.finish_reason,
        "error": request.error_code,
        "prompt_tokens": outputs and outputs.num_prompt_tokens,
        "cached_tokens": outputs and outputs.num_cached_tokens,
        "output_tokens": outputs and outputs.num_output_tokens,
        "seconds": end - start,
        "segments": [
            {"name": name, "seconds": until - since} for (name, since), until in zip(reached, ends, strict=True)
        ],
        "blocked_on_client_seconds": request.blocked_seconds,
        "events": [
            {"at": event.time - start, "choice": choice, "event": event.kind, "tokens": event.tokens}
            for choice, event in (outputs.events if outputs else ())
        ],
    }
