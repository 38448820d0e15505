"""Which requests have run out of time. Owned by the Scheduler; times are seconds of `time.monotonic()`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from engine.scheduler.request import Request


class Deadlines:
    """A heap of deadlines, so that a step looks only at those that have passed.

    A request may have two: for its first token and for its end. Most requests end in time and leave their entries
    behind; when these outnumber the living, the heap is made anew.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def watch(self, request: Request) -> None:
        for deadline in (request.first_token_deadline, request.deadline):
            if deadline < math.inf:
                heapq.heappush(self._heap, (deadline, request.request_id))

    def passed(self, now: float, living: Mapping[str, Request]) -> list[Request]:
        """Living requests that are out of time; each is named once."""
        if len(self._heap) > 4 * len(living) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in living]
            heapq.heapify(self._heap)
        late: dict[str, Request] = {}
        while self._heap and self._heap[0][0] <= now:
            request = living.get(heapq.heappop(self._heap)[1])
            if request is not None and request.is_late(now):
                late[request.request_id] = request
        return list(late.values())
