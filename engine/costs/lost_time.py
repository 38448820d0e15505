"""Detection of steps that other work on the machine delayed: their times do not show what a step costs.

It works for executors that compute in the calling thread, by that thread's CPU time: if a step took much longer than
its thread computed, the thread waited for a processor, or for a helper thread that waited for one. It detects nothing
if a device or other processes compute, because the thread waits for them anyway, nor if a helper thread loses its
processor while the calling thread spins; `StepCostTracker` has rules for such steps. Owned by the EngineCore.
"""

from __future__ import annotations

from engine.executor import ComputesHere, Executor

MOST_LOST = 0.2  # the part of a step's time during which its thread may wait
MOST_IN_A_ROW = 8  # delayed steps; after more, the machine counts as busy for good, and their times are believed


class LostTime:
    """Compare a step's time with the CPU time of its thread."""

    def __init__(self, executor: Executor) -> None:
        self._cpu_seconds = executor.cpu_seconds if isinstance(executor, ComputesHere) else None
        self._began = 0.0
        self._in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """Note that a step begins now."""
        if self._cpu_seconds is not None:
            self._began = self._cpu_seconds()

    def was_held_up(self, seconds: float) -> bool:
        """Return True if the time of a step that ends now should not be believed. The next step begins."""
        if self._cpu_seconds is None:
            return False
        began, self._began = self._began, self._cpu_seconds()
        if self._began - began >= (1 - MOST_LOST) * seconds:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= MOST_IN_A_ROW
