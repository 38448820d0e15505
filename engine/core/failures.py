"""The search for the requests that make a step fail, so that the others go on.

When a step raises, its requests are put back and become suspects. While there are suspects, only a part of them runs at
a time: half of those that failed together, then half of that half. A part that completes the work of the failed step is
cleared; a suspect that fails alone is faulty. With k faulty among n requests, this takes about k * 2 * log2(n) steps.
If an error occurs only in a large batch (memory), or only once, no request is found faulty and none ends.

Owned by the EngineCore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from engine.scheduler.request import Request


class Quarantine:
    """Groups of suspects; the first group runs alone."""

    def __init__(self) -> None:
        # Request id → how many tokens it must have computed to be cleared.
        self._groups: deque[dict[str, int]] = deque()

    @property
    def suspects(self) -> set[str] | None:
        """The requests that may run in the next step; None if all may."""
        return set(self._groups[0]) if self._groups else None

    def split(self, failed: Mapping[str, int]) -> str | None:
        """Record that a step with these requests failed; the values are how many tokens it would have computed of each.

        Returns the faulty request, if this was the failure of a single suspect.
        """
        suspects = self._groups.popleft() if self._groups else {}
        unharmed = {request_id: mark for request_id, mark in suspects.items() if request_id not in failed}
        if unharmed:
            self._groups.appendleft(unharmed)
        ids = list(failed)
        if ids == list(suspects) and len(ids) == 1:
            return ids[0]
        middle = (len(ids) + 1) // 2
        for part in (ids[middle:], ids[:middle]):
            if part:
                self._groups.appendleft({request_id: failed[request_id] for request_id in part})
        return None

    def clear(self, living: Mapping[str, Request]) -> None:
        """Clear suspects that have computed enough tokens or have ended. Called before each step."""
        while self._groups:
            group = self._groups[0]
            for request_id in list(group):
                request = living.get(request_id)
                if request is None or request.num_computed_tokens >= group[request_id]:
                    del group[request_id]
            if group:
                return
            self._groups.popleft()
