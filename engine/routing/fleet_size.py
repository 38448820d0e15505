"""How many engines there should be, by what waits: for the engines of one server, and for Ray Serve's replicas."""

from __future__ import annotations

import math
from collections import deque

MAX_QUEUED_SECONDS = 2.0
RUNNING_SHARE = 0.8  # of all running slots; where more are taken, another engine is wanted before anybody waits
UPSCALE_SECONDS, DOWNSCALE_SECONDS = 5.0, 300.0  # for which more, or fewer, have to be wanted


def wanted_engines(queued_seconds: float, running: float, max_queued_seconds: float = MAX_QUEUED_SECONDS) -> int:
    """As many as it takes for nobody to wait for longer than that. `queued_seconds` and `running`, the share of running
    slots that are taken, are sums over all engines."""
    # Who waits has all slots taken before him, so work that waits comes on top of the work that runs.
    return math.ceil(queued_seconds / max_queued_seconds + running / RUNNING_SHARE)


class FleetSize:
    """How many engines there should be: raised to the fewest that were wanted at any time in the last
    `UPSCALE_SECONDS`, lowered to the most in the last `DOWNSCALE_SECONDS`."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = most
        self._wanted: deque[tuple[float, int]] = deque()  # when, and how many
        self._began: float | None = None

    def update(self, wanted: int, now: float) -> int:
        """How many there should be now. To be asked every second or so."""
        self._began = now if self._began is None else self._began
        self._wanted.append((now, min(max(wanted, self._least), self._most)))
        while self._wanted[0][0] < now - DOWNSCALE_SECONDS:
            self._wanted.popleft()
        if now - self._began >= UPSCALE_SECONDS:
            self.size = max(self.size, min(each for when, each in self._wanted if when >= now - UPSCALE_SECONDS))
        if now - self._began >= DOWNSCALE_SECONDS:
            self.size = min(self.size, max(each for _, each in self._wanted))
        return self.size
