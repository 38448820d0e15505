"""A collector of traces, in the process of the tests: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Trace:
    """What one request was told as: its own span, and under each span its children, by when they began."""

    root: Span
    children: dict[bytes, list[Span]]
    attributes: dict[str, Any]

    @property
    def phases(self) -> list[Span]:
        return self.children.get(self.root.span_id, [])

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.phases]

    def phase(self, name: str) -> Span:
        return next(span for span in self.phases if span.name == name)


@dataclass
class Collector:
    """Collects spans; a context manager. While `answers` is not set, it takes requests and does not answer them."""

    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""

    def __enter__(self) -> Self:
        self.answers.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._take))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.answers.wait()
        if path != "/v1/traces":
            return 404
        if self.status == 200:
            body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
            self.raw += body
            self.headers.append(headers)
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_plain(of_resource.resource.attributes))
                for of_scope in of_resource.scope_spans:
                    self.spans += of_scope.spans
        return self.status

    def traces(self) -> list[Trace]:
        """Those that have arrived whole."""
        spans = sorted(self.spans, key=lambda span: span.start_time_unix_nano)
        children: dict[bytes, list[Span]] = {}
        for span in spans:
            children.setdefault(span.parent_span_id, []).append(span)
        roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        return [Trace(root, children, _plain(root.attributes)) for root in roots]

    def find(self, request_id: str) -> Trace | None:
        """The trace of the request with this id."""
        keys = ("headrace.request_id", "gen_ai.request.id")
        return next((t for t in self.traces() if request_id in map(t.attributes.get, keys)), None)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def _handler(take: Callable[[str, dict[str, str], bytes], int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
