"""What time it is. Whoever needs to know is handed a clock, so that a simulation can hand in its own."""

from __future__ import annotations

from collections.abc import Callable

# Seconds that only grow. What is compared across processes needs `time.monotonic`, one for all of a machine on Linux.
Clock = Callable[[], float]
