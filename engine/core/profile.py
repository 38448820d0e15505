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
from engine.core.executor import MAX_PROFILE_BYTES, Executor, Profiles
from engine.errors import ProfileTooLarge
from engine.snapshot import StepSnapshot

HOST, STEPS = 1, 2  # tracks


class StepProfiler:
    """Records steps when it is asked to. Owned by the EngineCore."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor if isinstance(executor, Profiles) else None
        self._events: list[dict[str, Any]] = []
        self._num_left = 0
        self._num_steps = 0
        self._ended: float | None = None  # the step before
        self._failure: Exception | None = None  # of the executor's part

    def start(self, num_steps: int) -> Profile:
        """Record the next steps. What was recorded before is dropped."""
        self._end_recording()
        self._events = [_name(HOST, "engine"), _name(STEPS, "steps")]
        self._num_steps, self._ended, self._failure = 0, None, None
        if self._executor is not None:
            self._executor.start_profile()
        self._num_left = num_steps
        return Profile()

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
        if self._num_left == 1:
            self._end_recording()
        else:
            self._num_left -= 1

    def stop(self) -> Profile:
        """What was recorded since the start, once."""
        self._end_recording()
        events, num_steps, failure = self._events, self._num_steps, self._failure
        self._events, self._num_steps, self._failure = [], 0, None
        if failure is not None and not isinstance(failure, ProfileTooLarge):
            raise failure
        encoded = msgspec.json.encode(events)
        if failure is not None or len(encoded) > MAX_PROFILE_BYTES:
            return Profile(num_steps=num_steps, is_too_large=True)
        return Profile(encoded, num_steps)

    def _end_recording(self) -> None:
        if not self._num_left:
            return
        self._num_left = 0
        if self._executor is not None:
            try:
                self._events += self._executor.stop_profile()
            except Exception as error:  # a look at the engine must not end it
                self._failure = error

    def _add(self, name: str, track: int, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": 0, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
        self._events.append(event | {"args": args} if args else event)


def _name(track: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
