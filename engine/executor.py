"""The seam between the engine and whatever runs a plan.

The application chooses an executor and hands it to the engine; a simulated one stands in for a device in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.plan import ModelRunnerOutput, SchedulerOutput


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Raises what the step raised. Called once."""
        ...


class Executor(Protocol):
    """Runs plans in order. Used by one thread only, the engine's."""

    num_blocks: int  # KV blocks that exist; ids are 0 .. num_blocks - 1
    block_size: int  # tokens per block
    vocab_size: int

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        """Start one step. May return before it has run; plans are executed in the order given.

        `abandoned` tells whether nobody wants the step's results any more. An executor that can stop in the middle
        asks it now and then, and raises StepAbandoned from `result`; one that cannot need not ask. The plan's diffs
        have been applied then, and no request has advanced. After any other error, too, no request may have advanced;
        the diffs may have been applied or not: all requests of the plan and all its removals are removed by the next.
        """
        ...

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        ...
