"""What happened to each of the last requests, and how long it took: the answer to "why was this one slow?".

The segments follow each other without a gap, so they add up to the request's time: `receive` (body), `tokenize`
(validation, template, tokens), `queue`, `prefill`, `decode`, `deliver` (until the client has everything). Events are
what the engine did in between. Kept in memory for the last `timeline_size` requests; a tenant sees its own only, and
one that asks a lot pushes out its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from app.scope import RequestScope


class Timelines:
    """Timelines of ended requests. The oldest of the tenant that has the most is forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_kept = 0
        self._kept: dict[str, OrderedDict[str, dict[str, Any]]] = {}  # by tenant and request id

    def keep(self, request: RequestScope, status: int, end: float) -> None:
        """Remember a generation request that has ended at `end`."""
        if self._size:
            own = self._kept.setdefault(request.tenant.name, OrderedDict())
            self._num_kept += request.request_id not in own
            own[request.request_id] = timeline(request, status, end)
            own.move_to_end(request.request_id)
            if self._num_kept > self._size:
                self._forget_one(request.tenant.name)

    def _forget_one(self, latest: str) -> None:
        num_own = len(self._kept[latest])
        tenant = latest
        if num_own == 1 or num_own * len(self._kept) <= self._size:  # else nobody looks at all the others
            tenant = max(self._kept, key=lambda each: len(self._kept[each]))
        self._kept[tenant].popitem(last=False)
        self._num_kept -= 1
        if not self._kept[tenant]:
            del self._kept[tenant]

    def find(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        """A tenant's own request, if it is still remembered."""
        own = self._kept.get(tenant)
        return None if own is None else own.get(request_id)


def timeline(request: RequestScope, status: int, end: float) -> dict[str, Any]:
    """The story of a request that has ended at `end`. Times are seconds since its arrival."""
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
