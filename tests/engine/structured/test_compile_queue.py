"""Who compiles next: turns between tenants, a thread for what is small, and nothing for those who have left."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import wait
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.fairness import RoundRobin, TenantLRU
from engine.messages import StructuredOutput, StructuredOutputKind
from engine.structured.compile_queue import (
    COMPILER_THREADS,
    SMALL_CHARACTERS,
    CompileQueue,
    Owner,
)

LARGE = " " * SMALL_CHARACTERS
SECONDS = 60


def text(value: str) -> StructuredOutput:
    return StructuredOutput(kind=StructuredOutputKind.REGEX, value=value)


# --- turns


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from("abcd")),
            st.tuples(st.just("pop"), st.none()),
            st.tuples(st.just("leave"), st.integers(0, 60)),
        ),
        max_size=120,
    )
)
def test_tenants_take_turns_and_nobody_starves(actions: list) -> None:
    """Oldest first within a tenant; whoever has something is served before anybody else is served twice."""
    turns: RoundRobin[int] = RoundRobin()
    lines: dict[str, list[int]] = {tenant: [] for tenant in "abcd"}
    passed_over: dict[str, set[str]] = {}  # by tenants that wait: who has had a turn since they began to
    owner: dict[int, str] = {}
    for number, (action, argument) in enumerate([*actions, *[("pop", None)] * len(actions)]):
        if action == "push":
            owner[number] = argument
            if not lines[argument]:
                passed_over[argument] = set()
            lines[argument].append(number)
            turns.push(argument, number)
        elif action == "leave":
            if argument in owner:
                tenant = owner[argument]
                waiting = list(lines[tenant])
                with suppress(ValueError):
                    lines[tenant].remove(argument)
                assert turns.discard(tenant, argument) is (argument in waiting)
        elif any(lines.values()):
            item = turns.pop()
            assert item is not None
            tenant = owner[item]
            assert lines[tenant].pop(0) == item
            for other, line in lines.items():
                if line and other != tenant:
                    assert tenant not in passed_over[other], "its second turn while another has had none"
                    passed_over[other].add(tenant)
            passed_over[tenant] = set()
        else:
            assert turns.pop() is None
        assert len(turns) == sum(map(len, lines.values()))
    assert not turns._lines


# --- the queue


class Gated:
    """Work that waits until it is told to go on, and remembers what was begun, by its text without blanks."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._may_end = 0

    def __call__(self, owner: Owner, structured: StructuredOutput) -> str:
        name = structured.value.strip()
        with self._changed:
            self.begun.append(name)
            number = len(self.begun)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._may_end >= number, SECONDS)
        if name == "fault":
            raise ValueError(name)
        if name == "panic":
            raise SystemExit(name)
        return name

    def wait_begun(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, SECONDS), self.begun
            return list(self.begun)

    def end(self, count: int) -> None:
        """Let everything end but what is begun after this many."""
        with self._changed:
            self._may_end = count
            self._changed.notify_all()


@pytest.fixture
def work():
    gated = Gated()
    yield gated
    gated.end(10**6)


def test_a_tenant_waits_for_one_turn_of_another_and_not_for_its_line(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    flood = [queue.submit(Owner("flood"), text(f"flood {number}")) for number in range(50)]
    work.wait_begun(COMPILER_THREADS)
    guest = [queue.submit(Owner("guest"), text(f"guest {number}")) for number in range(3)]
    work.end(10**6)
    wait(flood + guest, SECONDS)
    assert [future.result() for future in guest] == ["guest 0", "guest 1", "guest 2"]
    places = [place for place, name in enumerate(work.begun) if name.startswith("guest")]
    # Two threads begin things in an order that may be told a place later than it was decided.
    assert places[-1] <= COMPILER_THREADS + 2 * 3 + 1
    assert sorted(work.begun) == sorted([f"flood {n}" for n in range(50)] + [f"guest {n}" for n in range(3)])


def test_where_there_is_another_tenant_none_holds_both_threads(work: Gated) -> None:
    """However small its text: that a compilation is short is not to be seen before, and it cannot be interrupted."""
    queue: CompileQueue[str] = CompileQueue(work)
    work.end(1)
    assert queue.submit(Owner("guest"), text("guest 0")).result(SECONDS) == "guest 0"
    flood = [queue.submit(Owner("flood"), text(f"flood {number}")) for number in range(9)]
    assert work.wait_begun(2)[1:] == ["flood 0"]
    guest = queue.submit(Owner("guest"), text("guest 1"))
    assert work.wait_begun(3)[1:] == ["flood 0", "guest 1"], "while the other's is still being compiled"
    large = queue.submit(Owner("third"), text(f"third {LARGE}"))
    work.end(10**6)
    wait([*flood, guest, large], SECONDS)
    assert sorted(work.begun) == sorted(["guest 0", "guest 1", "third", *(f"flood {number}" for number in range(9))])


def test_a_thread_that_found_nothing_it_might_take_is_there_again_when_it_may(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    work.end(1)
    queue.submit(Owner("b"), text("b 0")).result(SECONDS)
    futures = [queue.submit(Owner("a"), text(f"a 0{LARGE}"))]
    work.wait_begun(2)
    futures += [queue.submit(Owner("a"), text("a 1")), queue.submit(Owner("b"), text(f"b 1{LARGE}"))]
    work.end(2)
    assert sorted(work.wait_begun(4)[2:]) == ["a 1", "b 1"], "side by side"
    work.end(10**6)
    wait(futures, SECONDS)


def test_what_is_large_is_told_by_all_its_texts() -> None:
    for changes in ({"value": LARGE}, {"whitespace_pattern": LARGE}, {"reasoning": ("", LARGE)}):
        assert structs.replace(text("a"), **changes).size == len(LARGE) + ("value" not in changes)


def test_what_is_small_passes_what_is_large_of_the_same_tenant_and_neither_starves(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    large = [queue.submit(Owner(), text(f"large {number}{LARGE}")) for number in range(8)]
    assert work.wait_begun(1) == ["large 0"], "and nothing else: the other thread is not for them"
    small = [queue.submit(Owner(), text(f"small {number}")) for number in range(3)]
    assert work.wait_begun(2) == ["large 0", "small 0"]
    work.end(1)  # the large one: its successor is large
    assert work.wait_begun(3)[2] == "large 1"
    work.end(10**6)
    wait(large + small, SECONDS)
    assert len(work.begun) == 11


def test_clients_gone_while_queued_cost_nothing_and_one_gone_later_keeps_its_turn(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    futures = [queue.submit(Owner("a"), text(f"a {number}")) for number in range(20)]
    work.wait_begun(2)
    for future in futures:
        future.cancel()
    assert len(queue) == 0
    last = queue.submit(Owner("a"), text("a 20"))
    assert len(queue) == 1, "both threads are taken by those who have left"
    work.end(10**6)
    assert last.result(SECONDS) == "a 20"
    assert sorted(work.begun) == ["a 0", "a 1", "a 20"]
    deadline = time.monotonic() + SECONDS
    while queue._jobs:  # the other of the first two may just be ending
        assert time.monotonic() < deadline


def test_who_asks_for_what_is_on_its_way_waits_for_it_and_another_owner_does_not(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    first, second = (queue.submit(Owner("a"), text("same")) for _ in range(2))
    work.wait_begun(1)
    salted = queue.submit(Owner("a", "salt"), text("same"))
    third = queue.submit(Owner("a"), text("same"))
    work.wait_begun(2)
    first.cancel()
    work.end(10**6)
    assert [future.result(SECONDS) for future in (second, third, salted)] == ["same"] * 3
    assert work.begun == ["same", "same"]


def test_one_of_two_who_wait_for_the_same_may_leave(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    held = [queue.submit(Owner(), text(f"held {number}")) for number in range(2)]
    work.wait_begun(2)
    first, second = (queue.submit(Owner(), text("same")) for _ in range(2))
    first.cancel()
    work.end(10**6)
    assert second.result(SECONDS) == "same"
    wait(held, SECONDS)


def test_failures_and_panics_reach_those_who_wait_as_errors_and_end_no_thread(work: Gated) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    work.end(10**6)
    with pytest.raises(ValueError, match="fault"):
        queue.submit(Owner(), text("fault")).result(SECONDS)
    with pytest.raises(RuntimeError, match="SystemExit"):
        queue.submit(Owner(), text("panic")).result(SECONDS)
    assert queue.submit(Owner(), text("fine")).result(SECONDS) == "fine"


def test_where_no_thread_can_be_started_the_request_fails_and_the_next_may_not(
    work: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    work.end(10**6)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            queue.submit(Owner(), text("a"))
    assert len(queue) == 0
    assert queue.submit(Owner(), text("a")).result(SECONDS) == "a"


@pytest.mark.parametrize("stage", ["pop", "_start_thread"])
def test_a_thread_that_fails_between_two_compilations_leaves_nobody_waiting(
    work: Gated, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: CompileQueue[str] = CompileQueue(work)
    first = queue.submit(Owner(), text("first"))
    work.wait_begun(1)
    beside = queue.submit(Owner("other"), text("beside"))
    work.wait_begun(2)
    waiting = [queue.submit(Owner(), text(f"{size} {number}")) for number in range(3) for size in ("small", LARGE)]

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RoundRobin if stage == "pop" else CompileQueue, stage, fail)
        work.end(10**6)
        assert (first.result(SECONDS), beside.result(SECONDS)) == ("first", "beside")
        for future in waiting:
            with pytest.raises(RuntimeError, match="MemoryError"):
                future.result(SECONDS)
        while queue._num_threads:  # the other thread may be about to fail, too, and would take a later job along
            time.sleep(0.001)
    assert queue.submit(Owner(), text("later")).result(SECONDS) == "later"
    assert (queue._jobs, queue._running, queue._large_is_running) == ({}, [], False)


# --- the cache


def test_a_full_cache_takes_from_the_tenant_that_holds_most() -> None:
    cache: TenantLRU[int] = TenantLRU(128, 1000)
    for number in range(3):
        cache.keep("guest", number, number, 1)
    for number in range(1000):
        cache.keep("flood", number, number, 1)
    assert [cache.find("guest", number) for number in range(3)] == [0, 1, 2]
    assert cache.find("flood", 0) is None
    assert cache.find("flood", 999) == 999
    assert len(cache) == 128
    for number in range(60):
        cache.keep("flood", number, number, 50)
    assert [cache.find("guest", number) for number in range(3)] == [0, 1, 2]
    assert len(cache) < 25


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "s"]), st.integers(0, 200)), max_size=400))
def test_the_cache_is_within_its_bounds_and_gives_what_was_kept(actions: list) -> None:
    cache: TenantLRU[str] = TenantLRU(128, 1000)
    kept: OrderedDict[tuple, str] = OrderedDict()
    for tenant, salt, number in actions:
        key = salt, number
        cache.keep(tenant, key, f"{tenant} {number}", number)
        assert cache.num_bytes <= 1000
        kept[tenant, key] = f"{tenant} {number}"
        assert cache.find(tenant, key) == kept[tenant, key]
        assert len(cache) <= 128
    for (tenant, key), value in kept.items():
        assert cache.find(tenant, key) in (value, None)
    held = [entry for entries in cache._entries.values() for entry in entries.values()]
    assert (len(cache), cache.num_bytes) == (len(held), sum(num_bytes for _, num_bytes in held))
    assert all(cache._entries.values())
