"""What a request did from its arrival to its end, as phases that follow each other without a gap, so that they add up.

Much goes on at once, and a phase is what the answer waits for. With several choices it is that of the choice that is
furthest: one that decodes hides that another waits. While the client does not read, the engine goes on, so its phases
count until it is done; when sending was blocked stands beside them (`RequestScope.blocked`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from app.trace_names import Phase
from engine.frontend.request_stream import RequestStream
from engine.messages import EventKind, RequestEvent

MAX_SPANS: Final = 64  # of one request in the engine; one that is preempted oftener stays in the last
MAX_EVENTS: Final = 64  # of one span
_IN_ENGINE: Final = (
    *(Phase.DECODE, Phase.PREFILL, Phase.LOAD_KV, Phase.WAIT_FOR_GRAMMAR, Phase.PREEMPTED, Phase.QUEUE, Phase.ENDED),
)
_AT_THE_END: Final = frozenset(EventKind) - {EventKind.SCHEDULED, EventKind.LOADING, EventKind.WAITS_FOR_GRAMMAR}


@dataclass(slots=True)
class PhaseSpan:
    """Times are `time.monotonic()`; `events` are what the engine did meanwhile, with the number of the choice."""

    phase: Phase
    start: float
    end: float = math.inf
    events: list[tuple[int, RequestEvent]] = field(default_factory=list)


def phases(marks: Sequence[tuple[Phase, float]], outputs: RequestStream | None, end: float) -> list[PhaseSpan]:
    """The phases of a request that has ended at `end`. `marks` are those before the engine had it, with their
    beginnings, the first with its arrival; `outputs` is None if the engine never had it."""
    spans = [PhaseSpan(phase, begin) for phase, begin in marks]
    if outputs is not None:
        spans += _in_engine(outputs)
        if outputs.finished_time is not None:
            spans.append(PhaseSpan(Phase.DELIVER, outputs.finished_time))
    for span, following in pairwise([*spans, PhaseSpan(Phase.ENDED, end)]):
        # A clock read by another thread may be a little ahead.
        span.end = following.start = min(max(span.start, following.start), end)
    return [span for span in spans if span.end > span.start]


def _in_engine(outputs: RequestStream) -> list[PhaseSpan]:
    num_choices = len(outputs.child_ids)
    missing = [length for length in outputs.prompt_lengths for _ in range(num_choices // len(outputs.prompt_lengths))]
    states = [Phase.QUEUE] * num_choices
    num_in = Counter(states)
    spans = [PhaseSpan(Phase.QUEUE, outputs.opened_time)]
    for choice, event in sorted(outputs.events, key=lambda each: each[1].time):
        before = spans[-1]
        match event.kind:
            case EventKind.SCHEDULED | EventKind.PREFILL:
                missing[choice] -= event.tokens
                state = Phase.PREFILL if missing[choice] > 0 or outputs.first_token_time is None else Phase.DECODE
            case EventKind.PREEMPTED:
                missing[choice] = event.tokens
                state = Phase.PREEMPTED
            case EventKind.LOADING:
                state = Phase.LOAD_KV
            case EventKind.WAITS_FOR_GRAMMAR:
                state = Phase.WAIT_FOR_GRAMMAR
            case EventKind.FINISHED:
                state = Phase.ENDED
            case _:
                state = Phase.QUEUE
        num_in[states[choice]] -= 1
        num_in[state] += 1
        states[choice] = state
        phase = next(each for each in _IN_ENGINE if num_in[each])
        if phase is not before.phase and len(spans) < MAX_SPANS:
            spans.append(PhaseSpan(phase, event.time))
        told = before if event.kind in _AT_THE_END else spans[-1]
        if len(told.events) < MAX_EVENTS:
            told.events.append((choice, event))
    return spans
