"""What steps do with their time while somebody wants to know, as events of Chrome's trace format, in microseconds of
`time.monotonic()` (Google, "Trace Event Format").

The parts of a step follow each other: `schedule`, until the executor has the plan; `execute`, until its result is
there; `update`, until the next one is planned: bookkeeping, and telling the front end. Where a step is planned while
another runs, `schedule` lies within the other's `execute`. An executor that `Profiles` tells what it does in there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.commands import Profile
from engine.core.executor import Executor, Profiles
from engine.snapshot import StepSnapshot

MAX_BYTES = 64 * 2**20  # of an answer
HOST, STEPS = 1, 2  # tracks


class StepProfiler:
    """Records up to `num_steps` steps. Owned by the EngineCore."""

    def __init__(self, executor: Executor, num_steps: int) -> None:
        self._events: list[dict[str, Any]] = [_name(HOST, "engine"), _name(STEPS, "steps")]
        self._num_left = num_steps
        self._num_steps = 0
        self._ended: float | None = None  # the step before
        self._executor = executor if isinstance(executor, Profiles) else None
        if self._executor is not None:
            self._executor.start_profile()

    def note(self, step: StepSnapshot, planned_at: float, submitted_at: float, *, goes_on: bool) -> None:
        """A step has ended. `goes_on`: there was work from the end of the one before on."""
        if not self._num_left:
            return
        if self._ended is not None and goes_on and self._ended < planned_at:
            self._add("update", HOST, self._ended, planned_at)
        self._ended = step.time + step.seconds
        sizes = {
            "step": step.step,
            "requests": step.num_requests,
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.num_decode_tokens,
            "outcome": step.outcome.value,
        }
        self._add("schedule", HOST, planned_at, submitted_at)
        self._add("execute", STEPS, max(submitted_at, step.time), self._ended, sizes)
        self._num_steps += 1
        self._num_left -= 1
        if not self._num_left:
            self._take_executors()

    def stop(self) -> Profile:
        """What was recorded. Called once."""
        self._take_executors()
        events = msgspec.json.encode(self._events)
        if len(events) > MAX_BYTES:
            raise ValueError(f"a profile of {self._num_steps} steps takes {len(events)} bytes")
        return Profile(events, self._num_steps)

    def _take_executors(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            self._events += executor.stop_profile()

    def _add(self, name: str, track: int, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
        self._events.append(event | {"args": args} if args else event)


def _name(track: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
