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


class Timelines:
    """Timelines of ended requests, the oldest forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()  # by tenant and request id

    def keep(self, request: RequestScope, status: int) -> None:
        """Remember a generation request that has ended."""
        if self._size:
            key = (request.tenant.name, request.request_id)
            self._kept[key] = timeline(request, status)
            self._kept.move_to_end(key)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def find(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        """A tenant's own request, if it is still remembered."""
        return self._kept.get((tenant, request_id))


def timeline(request: RequestScope, status: int) -> dict[str, Any]:
    """The story of a request that has ended just now. Times are seconds since its arrival."""
    start, end = request.arrival_time, time.monotonic()
    generation = request.generation
    begins = [("receive", start), ("tokenize", request.received_time)]
    if generation is not None:
        begins += [
            ("queue", generation.opened_time),
            ("prefill", generation.first_scheduled_time),
            ("decode", generation.first_token_time),
            ("deliver", generation.finished_time),
        ]
    reached = [(name, begin) for name, begin in begins if begin is not None]
    ends = [*(begin for _, begin in reached[1:]), end]
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
            {"name": name, "seconds": until - since} for (name, since), until in zip(reached, ends, strict=True)
        ],
        "blocked_on_client_seconds": request.blocked_seconds,
        "events": [
            {"at": event.time - start, "choice": choice, "event": event.kind, "tokens": event.tokens}
            for choice, event in (generation.events if generation else ())
        ],
    }
