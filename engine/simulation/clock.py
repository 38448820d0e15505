"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """An `engine.clock.Clock` that stands still but for `sleep`, which returns at once. Not thread-safe."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)
