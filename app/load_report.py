"""What a replica tells a load balancer of itself with an answer, if the balancer asks: ORCA's load report.

A request with the header `endpoint-load-metrics-format: TEXT` (or `JSON`) gets `endpoint-load-metrics`. The names are
those of /metrics, so that it does not matter which of the two a balancer reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Message, Scope, Send

if TYPE_CHECKING:
    from app.server import Server

_ASKS, _TELLS = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def reporting(scope: Scope, send: Send, server: Server) -> Send:
    """`send`, or one that adds the report to the answer's headers."""
    wanted = next((value for name, value in scope["headers"] if name == _ASKS), b"").strip().upper()
    if wanted not in (b"TEXT", b"JSON"):
        return send

    async def send_with_report(message: Message) -> None:
        if message["type"] == "http.response.start":
            load = {"queued_seconds": server.admission.queued_seconds, **server.metrics.levels()}
            report = text_report(load) if wanted == b"TEXT" else json_report(load)
            message["headers"] = [*message["headers"], (_TELLS, report.encode())]
        await send(message)

    return send_with_report


def text_report(metrics: Mapping[str, float]) -> str:
    """In ORCA's TEXT form."""
    return "TEXT " + ", ".join(f"named_metrics.{name}={value:.6g}" for name, value in metrics.items())


def json_report(metrics: Mapping[str, float]) -> str:
    """In ORCA's JSON form."""
    return "JSON " + json.dumps({"named_metrics": {name: round(value, 6) for name, value in metrics.items()}})
