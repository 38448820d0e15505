"""Readers of an event log see the same whole, whenever they come and however slowly they read."""

from __future__ import annotations

from itertools import accumulate

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serving.response_store import READ_AT_ONCE, EventLog
from protocol.errors import ApiError

GONE = ApiError(404, "deleted")


def frames(first: int, count: int, size: int = 0) -> bytes:
    return b"".join(b"data: %d%b\n\n" % (number, b"x" * size) for number in range(first, first + count))


def log_of(counts: list[int], size: int = 0) -> EventLog:
    log = EventLog()
    for first, count in zip(accumulate(counts, initial=0), counts, strict=False):
        log.append(frames(first, count, size))
    return log


def read_all(log: EventLog, number: int) -> bytes:
    read = b""
    while True:
        events, number = log.read(number)
        if not events:
            return read
        read += events


@given(
    counts=st.lists(st.integers(0, 4), max_size=8), start=st.integers(0, 40), size=st.sampled_from([0, READ_AT_ONCE])
)
def test_a_reader_may_begin_at_any_event(counts: list[int], start: int, size: int) -> None:
    log = log_of(counts, size)
    assert log.next_number == sum(counts)
    assert read_all(log, start) == frames(start, max(0, sum(counts) - start), size)


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), freed=st.integers(0, 4000), start=st.integers(0, 32))
def test_what_is_forgotten_is_refused_and_the_rest_is_whole(counts: list[int], freed: int, start: int) -> None:
    log = log_of(counts)
    log.num_bytes = 10_000
    assert log.forget_oldest(freed) + log.num_bytes == 10_000
    begins = list(accumulate(counts, initial=0))
    kept = len(log._pieces)
    first = begins[len(counts) - kept]
    assert kept == len(counts) if freed == 0 else kept >= 1, "the latest piece stays"
    if start < first:
        with pytest.raises(ApiError, match="not kept"):
            read_all(log, start)
    else:
        assert read_all(log, start) == frames(start, max(0, sum(counts) - start))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_readers_at_their_own_pace_see_the_same_until_the_end() -> None:
    log = EventLog()
    seen: dict[int, bytes] = {}

    async def read(start: int, pace: int) -> None:
        number = start
        seen[start] = b""
        events, number = log.read(number)
        while events or not log.is_over:
            if events:
                seen[start] += events
                for _ in range(pace):
                    await anyio.lowlevel.checkpoint()
            else:
                await log.wait(number)
            events, number = log.read(number)

    async with anyio.create_task_group() as readers:
        for number in range(40):
            if number % 5 == 0:
                readers.start_soon(read, number, number)
            log.append(frames(number, 1))
            await anyio.lowlevel.checkpoint()
        log.end()
    assert seen == {start: frames(start, 40 - start) for start in range(0, 40, 5)}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_of_an_abandoned_log_readers_get_what_there_is_and_then_why() -> None:
    log = log_of([2])
    log.abandon(GONE)
    await log.abandoned.wait()
    await log.wait(5)
    events, number = log.read(0)
    assert events == frames(0, 2)
    with pytest.raises(ApiError, match="deleted"):
        log.read(number)


def test_a_reader_that_lags_behind_hears_why_a_log_is_forgotten() -> None:
    log = log_of([3])
    log.forget()
    log.abandon(GONE)
    with pytest.raises(ApiError, match="deleted"):
        log.read(1)


def test_who_follows_a_forgotten_log_misses_nothing_new() -> None:
    log = log_of([3])
    log.forget()
    with pytest.raises(ApiError, match="not kept"):
        log.read(0)
    log.append(frames(3, 2))
    assert log.read(3) == (frames(3, 2), 5)
