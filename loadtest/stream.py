"""One streamed chat completion as a client sees it, with the time of everything that arrived.

Imported by the locust file, and by tests without it: nothing here knows locust. It speaks HTTP by `http.client`,
because an HTTP library with line iterators and buffers of its own decides when bytes are handed on, and then measures
itself. `read1` returns what one chunk brought as soon as it is there. Under locust the sockets are gevent's.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

READ_SIZE = 65536


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to send requests, and as whom."""

    host: str  # http://127.0.0.1:8000, with a path in front of /v1 if there is one
    api_key: str = ""
    timeout: float = 60.0  # seconds of silence after which a server counts as gone

    @property
    def url(self) -> SplitResult:
        return urlsplit(self.host if "//" in self.host else f"http://{self.host}")

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return kind(self.url.hostname or "", self.url.port, timeout=self.timeout)

    def path(self, endpoint: str) -> str:
        return self.url.path.rstrip("/") + endpoint

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class Refused(Exception):
    """An answer other than 200. The message is only status and error code, so that equal failures count together."""

    def __init__(self, status: int, code: str, retry_after: float | None) -> None:
        super().__init__(f"HTTP {status} {code}".rstrip())
        self.status = status
        self.retry_after = retry_after  # seconds, if the server named them


class StreamBroken(Exception):
    """A stream that began well and did not end well: an error frame, no `[DONE]`, or no finish reason."""


@dataclass(kw_only=True)
class Timeline:
    """What happened to one request. Times are seconds of `time.perf_counter()`."""

    started: float  # before the connection was opened
    arrivals: list[float] = field(default_factory=list)  # of every piece of text; those of one read share their time
    ended: float = 0.0
    num_bytes: int = 0
    num_prompt_tokens: int = 0  # as the server counts them
    num_tokens: int = 0
    finish_reason: str | None = None
    left: bool = False  # the client hung up on purpose

    @property
    def ttft(self) -> float | None:
        """Time to first token: from before connecting to the first piece of text."""
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the time between one piece of text and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def tokens_per_second(self) -> float | None:
        """The speed at which the text grew once it had begun, in tokens."""
        if self.num_tokens < 2 or len(self.arrivals) < 2 or self.arrivals[-1] == self.arrivals[0]:
            return None
        return (self.num_tokens - 1) / (self.arrivals[-1] - self.arrivals[0])

    @property
    def e2e(self) -> float:
        return self.ended - self.started


def stream_chat(target: Target, body: dict[str, Any], *, leave_after: int | None = None) -> Timeline:
    """Send a chat completion and read its stream to the end, or hang up after `leave_after` pieces of text.

    Each request has a connection of its own. Raises Refused, StreamBroken, OSError (a timeout among them) or
    http.client.HTTPException.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers = target.headers | {"Content-Type": "application/json", "Accept": "text/event-stream"}
    timeline = Timeline(started=time.perf_counter())
    with closing(target.connect()) as connection:
        connection.request("POST", target.path("/v1/chat/completions"), json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
        for event in _events(response, timeline):
            _take_in(event, timeline)
            if leave_after is not None and len(timeline.arrivals) >= leave_after:
                timeline.left = True
                break
    timeline.ended = time.perf_counter()
    if not timeline.left and timeline.finish_reason is None:
        raise StreamBroken("no finish_reason")
    return timeline


def first_model(target: Target) -> str:
    """The first model that the server lists. Raises what `stream_chat` raises, and LookupError if there is none."""
    with closing(target.connect()) as connection:
        connection.request("GET", target.path("/v1/models"), headers=target.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
        models = json.load(response)["data"]
        if not models:
            raise LookupError("the server lists no models")
        return models[0]["id"]


def _events(response: http.client.HTTPResponse, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The data of each event up to `[DONE]`; `timeline.ended` is the time of the read that brought it."""
    pending = b""
    while chunk := response.read1(READ_SIZE):
        timeline.ended = time.perf_counter()
        timeline.num_bytes += len(chunk)
        *events, pending = (pending + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
            if data == b"[DONE]":
                return
            if data:  # else a comment that keeps the connection alive
                yield json.loads(data)
    raise StreamBroken("the stream ended without [DONE]")


def _take_in(event: dict[str, Any], timeline: Timeline) -> None:
    if "error" in event:
        error = event["error"] if isinstance(event["error"], dict) else {}
        raise StreamBroken(f"error frame {error.get('code') or error.get('type')}")
    for choice in event["choices"]:
        if choice["delta"].get("content"):
            timeline.arrivals.append(timeline.ended)
        timeline.finish_reason = choice["finish_reason"] or timeline.finish_reason
    if usage := event.get("usage"):
        timeline.num_prompt_tokens = usage["prompt_tokens"]
        timeline.num_tokens = usage["completion_tokens"]


def _refusal(response: http.client.HTTPResponse) -> Refused:
    try:
        error = json.loads(response.read())["error"]
        code = str(error.get("code") or error.get("type") or "")
    except (ValueError, TypeError, LookupError, AttributeError):
        code = ""
    retry_after = response.headers.get("Retry-After", "")
    return Refused(response.status, code, float(retry_after) if retry_after.isdigit() else None)
