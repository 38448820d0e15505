"""Finds the steps that were held up by other work on the machine, which say nothing of what a step costs.

Only for executors that compute in the thread that calls them, because then its CPU time tells: a step that took much
longer than its thread computed was waiting for a processor, or for a helper thread that was. It says nothing where a
device or other processes compute, for which the thread waits anyway, nor of a helper that loses its processor while
this thread spins for it; such steps are left to the rules of `StepCostTracker`. Owned by the EngineCore.
"""

from __future__ import annotations

from engine.core.executor import ComputesHere, Executor

MOST_LOST = 0.2  # of a step's time
MOST_IN_A_ROW = 8  # after so many, the machine is as busy as this for good: then it is what steps cost


class LostTime:
    """Compares a step's time with the CPU time of the thread."""

    def __init__(self, executor: Executor) -> None:
        self._cpu_seconds = executor.cpu_seconds if isinstance(executor, ComputesHere) else None
        self._began = 0.0
        self._in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """A step begins now."""
        if self._cpu_seconds is not None:
            self._began = self._cpu_seconds()

    def was_held_up(self, seconds: float) -> bool:
        """Return True if a step of so many seconds, which ends now, should not be believed. The next one begins."""
        if self._cpu_seconds is None:
            return False
        began, self._began = self._began, self._cpu_seconds()
        if self._began - began >= (1 - MOST_LOST) * seconds:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= MOST_IN_A_ROW
