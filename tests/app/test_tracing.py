"""What a trace of a request shows."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.request_record import RequestRecord
from app.settings import Settings, SettingsError
from app.tracing import SpanTracer, open_tracer

pytestmark = pytest.mark.slow

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def a_trace(**changes: Any) -> RequestRecord:
    now = time.monotonic()
    fields: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "route": "/v1/chat/completions",
        "request_id": "chatcmpl-1",
        "model": "tiny",
        "arrival_time": now - 4.0,
        "first_scheduled_time": now - 3.0,
        "first_token_time": now - 2.0,
        "ended_time": now,
        "finish_reason": "stop",
        "num_prompt_tokens": 31,
        "num_cached_tokens": 16,
        "num_output_tokens": 8,
    }
    return RequestRecord(**(fields | changes))


def recorded(trace: RequestRecord) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter))
    tracer.record(trace)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_queue_prefill_and_decode_fill_the_request_without_a_gap() -> None:
    spans = recorded(a_trace())
    assert {name: round(seconds(span), 3) for name, span in spans.items()} == {
        "queue": 1.0,
        "prefill": 1.0,
        "decode": 2.0,
        "/v1/chat/completions": 4.0,
    }
    root = spans["/v1/chat/completions"]
    assert spans["queue"].start_time == root.start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["decode"].end_time == root.end_time
    parents = [spans[name].parent for name in ("queue", "prefill", "decode")]
    assert all(parent and parent.span_id == root.context.span_id for parent in parents)
    assert root.end_time is not None
    assert abs(root.end_time - time.time_ns()) < 60e9, "spans carry the time of day, not of the monotonic clock"


def test_a_request_aborted_in_the_queue_has_only_a_queue() -> None:
    never_ran = {"first_scheduled_time": None, "first_token_time": None, "finish_reason": "abort"}
    spans = recorded(a_trace(**never_ran, num_output_tokens=0))
    assert set(spans) == {"queue", "/v1/chat/completions"}
    assert seconds(spans["queue"]) == pytest.approx(4.0, abs=1e-3)
    assert attributes_of(spans["/v1/chat/completions"])["gen_ai.response.finish_reasons"] == ("abort",)


def test_the_callers_trace_goes_on() -> None:
    root = recorded(a_trace(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01"))["/v1/chat/completions"]
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID


def test_a_caller_who_does_not_sample_is_not_traced() -> None:
    assert recorded(a_trace(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")) == {}


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-01", "", "\x00" * 55])
def test_a_broken_traceparent_starts_a_new_trace(traceparent: str) -> None:
    assert recorded(a_trace(traceparent=traceparent))["/v1/chat/completions"].parent is None


def test_the_attributes_count_and_do_not_quote() -> None:
    assert attributes_of(recorded(a_trace())["/v1/chat/completions"]) == {
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 31,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.server.time_to_first_token": pytest.approx(2.0),
        "headrace.cached_tokens": 16,
    }


def test_traces_reach_a_collector_over_http() -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracer = open_tracer(Settings(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces"))
        tracer.record(a_trace())
        tracer.close()
        server.shutdown()
    assert len(bodies) == 1
    assert b"headrace" in bodies[0] or bodies[0][:2] == b"\x1f\x8b"  # plain, or gzip


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from app.settings import Settings; from app.tracing import open_tracer;"
        "open_tracer(Settings()).close(); sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_endpoint_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)  # what a missing package looks like to `import`
    with pytest.raises(SettingsError, match=r"pip install 'headrace\[otel\]'"):
        open_tracer(Settings(otlp_endpoint="http://127.0.0.1:4318/v1/traces"))
