"""Whatever happens to a request, in whatever order, its phases add up and say what its answer waited for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.record import Phase
from app.observability.spans import MAX_EVENTS, MAX_SPANS, PhaseSpan, phases
from engine.frontend.request_stream import RequestStream
from engine.messages import EngineCoreRequest, EventKind, RequestEvent, SamplingParams

PROMPT = [1] * 100
Events = list[tuple[int, EventKind, float, int]]  # choice, kind, time, tokens


def phases_of(
    events: Events, end: float = 20.0, *, n: int = 1, first_token: float | None = None, finished: float | None = None
) -> list[PhaseSpan]:
    """Of a request that arrives at 0 and comes to the engine at 1."""
    core = EngineCoreRequest(request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(n=n), arrival_time=0.0)
    outputs = RequestStream([core], [core] * n, 1.0)
    outputs.events = [(choice, RequestEvent(kind, at, tokens)) for choice, kind, at, tokens in events]
    outputs.first_token_time, outputs.finished_time = first_token, finished
    return phases([(Phase.RECEIVE, 0.0)], outputs, end)


def track(events: Events, **more: Any) -> list[tuple[str, float]]:
    """The phases in the engine, each with its end."""
    return [(span.phase.value, span.end) for span in phases_of(events, **more)[1:]]


def test_chunks_a_preemption_and_what_is_computed_again() -> None:
    events = [
        (0, EventKind.SCHEDULED, 2.0, 32),
        (0, EventKind.PREFILL, 3.0, 40),
        (0, EventKind.PREFILL, 4.0, 28),
        (0, EventKind.PREEMPTED, 6.0, 110),
        (0, EventKind.SCHEDULED, 8.0, 32),
        (0, EventKind.PREFILL, 9.0, 79),
    ]
    assert track(events, first_token=4.0, finished=12.0) == [
        *(("queue", 2.0), ("prefill", 4.0), ("decode", 6.0), ("preempted", 8.0), ("prefill", 9.0), ("decode", 12.0)),
        ("deliver", 20.0),
    ]
    told = [[event.tokens for _, event in span.events] for span in phases_of(events, first_token=4.0, finished=12.0)]
    assert told == [[], [], [32, 40, 28], [110], [], [32, 79], [], []]


def test_a_load_and_a_grammar_are_told_from_the_queue() -> None:
    events = [
        (0, EventKind.WAITS_FOR_GRAMMAR, 2.0, 0),
        (0, EventKind.GRAMMAR_READY, 3.0, 0),
        (0, EventKind.LOADING, 4.0, 64),
        (0, EventKind.LOADED_FROM_RAM, 6.0, 32),
        (0, EventKind.LOADED_FROM_DISK, 6.0, 32),
        (0, EventKind.SCHEDULED, 7.0, 64),
    ]
    waits = [("queue", 2.0), ("wait_for_grammar", 3.0), ("queue", 4.0), ("load_kv", 6.0), ("queue", 7.0)]
    assert track(events) == [*waits, ("prefill", 20.0)]


def test_the_choice_that_is_furthest_is_what_the_answer_waits_for() -> None:
    events = [
        (0, EventKind.SCHEDULED, 2.0, 0),
        (0, EventKind.PREFILL, 3.0, 100),
        (1, EventKind.SCHEDULED, 4.0, 96),
        (1, EventKind.PREFILL, 5.0, 4),
        (1, EventKind.PREEMPTED, 6.0, 100),
        (0, EventKind.FINISHED, 8.0, 5),  # from here on the other alone
        (1, EventKind.SCHEDULED, 9.0, 96),
        (1, EventKind.PREFILL, 10.0, 4),
    ]
    assert track(events, n=2, first_token=3.0, finished=12.0) == [
        *(("queue", 2.0), ("prefill", 3.0), ("decode", 8.0), ("preempted", 9.0), ("prefill", 10.0), ("decode", 12.0)),
        ("deliver", 20.0),
    ]


def test_without_a_token_nothing_decodes() -> None:
    for tokens in (50, 100):  # it left during the prompt; the prompt was all
        events = [(0, EventKind.SCHEDULED, 2.0, 0), (0, EventKind.PREFILL, 3.0, tokens)]
        assert track(events) == [("queue", 2.0), ("prefill", 20.0)]


def test_what_is_told_of_a_request_is_bounded() -> None:
    often = [
        (0, (EventKind.SCHEDULED, EventKind.PREEMPTED)[number % 2], 2.0 + number / 100, 100) for number in range(1000)
    ]
    spans = phases_of(often, first_token=2.0)
    assert len(spans) == MAX_SPANS + 1
    assert max(len(span.events) for span in spans) == MAX_EVENTS


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(EventKind), st.floats(0, 25), st.integers(0, 200)), max_size=200
)


@given(EVENTS, st.none() | st.floats(0, 25), st.none() | st.floats(0, 25), st.floats(0.001, 25))
def test_phases_have_neither_gap_nor_overlap(
    events: Events, first_token: float | None, finished: float | None, end: float
) -> None:
    spans = phases_of(events, end, n=3, first_token=first_token, finished=finished)
    assert (spans[0].start, spans[-1].end) == (0.0, end)
    assert all(one.end == following.start for one, following in itertools.pairwise(spans))
    assert sum(span.end - span.start for span in spans) == pytest.approx(end)
    assert len(spans) <= MAX_SPANS + 2
