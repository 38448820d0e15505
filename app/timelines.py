"""What happened to each of the last requests, and how long it took: the answer to "why was this one slow?".

The segments follow each other without a gap, so they add up to the request's time: `receive` (body), `tokenize`
(validation, template, tokens), `queue`, `prefill`, `decode`, `deliver` (until the client has everything). Events are
what the engine did in between. Kept in memory for the last `timeline_size` requests; a tenant sees its own only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from app.scope import RequestScope

SEGMENTS = ("receive", "tokenize", "queue", "prefill", "decode", "deliver")


class Timelines:
    """Timelines of ended requests, the oldest forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    def keep(self, request: RequestScope, status: int) -> None:
        """Remember a generation request that has ended."""
        if self._size:
            self._kept[request.request_id] = (request.tenant.name, timeline(request, status))
            self._kept.move_to_end(request.request_id)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def find(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        """A tenant's own request, if it is still remembered."""
        owner, found = self._kept.get(request_id, ("", None))
        return found if owner == tenant else None


def timeline(request: RequestScope, status: int) -> dict[str, Any]:
    """The story of a request that has ended just now. Times are seconds since its arrival."""
    start, end = request.arrival_time, time.monotonic()
    generation = request.generation
    marks = [request.received_time]
    if generation is not None:
        marks += [
            generation.opened_time,
            generation.first_scheduled_time,
            generation.first_token_time,
            generation.finished_time,
        ]
    reached = [mark for mark in marks if mark is not None]
    bounds = [start, *reached, end]
    return {
        "id": request.request_id,
        "status": status,
        "finish_reason": generation.finish_reason if generation else None,
        "error": request.error_code,
        "prompt_tokens": generation.num_prompt_tokens if generation else None,
        "cached_tokens": generation.num_cached_tokens if generation else None,
        "output_tokens": generation.num_output_tokens if generation else None,
        "seconds": end - start,
        "segments": [
            {"name": name, "seconds": until - since}
            for name, since, until in zip(SEGMENTS, bounds, bounds[1:], strict=False)
        ],
        "blocked_on_client_seconds": request.blocked_seconds,
        "events": [
            {"at": event.time - start, "choice": choice, "event": event.kind, "tokens": event.tokens}
            for choice, event in (generation.events if generation else ())
        ],
    }
