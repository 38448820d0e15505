"""The protocol of gpu/cpu/csrc/pool.h in all interleavings of its steps, and one that looked as good and was wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest

from tests.gpu.interleavings import (
    Memory,
    Op,
    Thread,
    Violation,
    add,
    compare_exchange,
    either,
    exchange,
    explore,
    load,
    lock,
    notify_all,
    store,
    unlock,
    wait,
)

# --- what is promised, whatever the protocol: memory["ran"] and memory["over"] are accounting, and no part of it


def body(loop: int, index: int) -> Thread:
    """One index of a loop; takes as long as anything may happen in between."""

    def begin(memory: Memory) -> None:
        assert loop not in memory["over"], f"index {index} of loop {loop} runs after its end"
        assert (loop, index) not in memory["ran"], f"index {index} of loop {loop} runs twice"
        memory["ran"] |= {(loop, index)}
        memory["inside"] |= {(loop, index)}

    def end(memory: Memory) -> None:
        memory["inside"] -= {(loop, index)}

    yield Op(begin)
    yield Op(end)


def returns(loop: int, count: int) -> Op:
    def act(memory: Memory) -> None:
        assert {index for ran, index in memory["ran"] if ran == loop} == set(range(count)), f"loop {loop} was not run"
        assert not {inside for inside in memory["inside"] if inside[0] == loop}, f"loop {loop} ends with work inside"
        memory["over"] |= {loop}

    return Op(act)


ACCOUNTING: Memory = {"ran": frozenset(), "inside": frozenset(), "over": frozenset()}
SLEEP: Memory = {"mutex": False, "asleep": frozenset(), "sleeping": 0, "ending": False}


# --- pool.h


class Pool:
    memory: ClassVar[Memory] = {"left": 0, "loop": None, "count": 0, "done": 0, "busy": False, "woken": False}
    memory |= SLEEP | ACCOUNTING

    @staticmethod
    def run(loop: int, count: int) -> Thread:
        if (yield exchange("busy", True)):
            for index in range(count):
                yield from body(loop, index)
            yield returns(loop, count)
            return
        yield store("loop", loop)
        yield store("count", count)
        yield store("done", 0)
        yield store("left", count)
        if (yield load("sleeping")):
            yield lock()
            yield unlock()
            yield notify_all()
        yield store("woken", True)  # for the check below
        yield from Pool.take()
        while (yield load("done")) < count:
            pass
        yield returns(loop, count)
        yield store("woken", False)
        yield store("busy", False)

    @staticmethod
    def take() -> Thread:
        while (yield load("left")) > 0:
            left = yield add("left", -1)
            if left <= 0:
                return
            loop = yield load("loop")
            count = yield load("count")
            yield from body(loop, count - left)
            yield add("done", 1)

    @staticmethod
    def help(me: str, sleeps: bool) -> Thread:
        while True:
            if (yield load("left")) <= 0:
                if not sleeps:
                    if (yield load("ending")):
                        return
                    continue
                if (yield either()):  # spin on
                    continue
                yield lock()
                yield add("sleeping", 1)
                while not (yield load("ending")) and (yield load("left")) <= 0:
                    yield from wait(me)
                yield add("sleeping", -1)
                ending = yield load("ending")
                yield unlock()
                if ending:
                    return
            yield from Pool.take()

    @staticmethod
    def check(memory: Memory) -> None:
        assert not (memory["woken"] and memory["left"] > 0 and memory["asleep"]), "a helper sleeps through a loop"


# --- as it was once: generation and next index share a word, the count has one of its own


class TicketAndCount:
    memory: ClassVar[Memory] = {"ticket": (0, 0), "count": 0, "done": 0, "loop": None, **SLEEP, **ACCOUNTING}

    @staticmethod
    def run(loop: int, count: int) -> Thread:
        yield store("loop", loop)
        yield store("count", count)
        yield store("done", 0)
        generation = (yield load("ticket"))[0] + 1
        yield store("ticket", (generation, 0))
        if (yield load("sleeping")):
            yield lock()
            yield unlock()
            yield notify_all()
        yield from TicketAndCount.take(generation)
        while (yield load("done")) < count:
            pass
        yield returns(loop, count)

    @staticmethod
    def take(generation: int) -> Thread:
        ticket = yield load("ticket")
        while ticket[0] == generation and ticket[1] < (yield load("count")):
            if (yield compare_exchange("ticket", ticket, (generation, ticket[1] + 1))):
                loop = yield load("loop")
                yield from body(loop, ticket[1])
                yield add("done", 1)
            ticket = yield load("ticket")

    @staticmethod
    def help(me: str, sleeps: bool) -> Thread:
        seen = 0
        while True:
            if (yield load("ticket"))[0] == seen:
                if not sleeps:
                    if (yield load("ending")):
                        return
                    continue
                if (yield either()):
                    continue
                yield lock()
                yield add("sleeping", 1)
                while not (yield load("ending")) and (yield load("ticket"))[0] == seen:
                    yield from wait(me)
                yield add("sleeping", -1)
                ending = yield load("ending")
                yield unlock()
                if ending:
                    return
            seen = (yield load("ticket"))[0]
            yield from TicketAndCount.take(seen)

    @staticmethod
    def check(memory: Memory) -> None: ...


Protocol = type[Pool] | type[TicketAndCount]


def caller(pool: Protocol, *loops: tuple[int, int], others: int = 0) -> Thread:
    """Runs loops, (number, count) of each. When those of all callers are over, the pool ends, as it is destroyed."""
    for loop, count in loops:
        yield from pool.run(loop, count)
    if len((yield load("over"))) == len(loops) + others:
        yield lock()
        yield store("ending", True)
        yield unlock()
        yield notify_all()


def walk(pool: Protocol, *callers: Callable[[], Thread], helpers: int, sleeping: bool) -> int:
    threads: dict[str, Callable[[], Thread]] = {f"caller {i}": each for i, each in enumerate(callers)}
    threads |= {f"helper {i}": partial(pool.help, f"helper {i}", sleeping) for i in range(helpers)}
    return explore(threads, dict(pool.memory), pool.check)


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_each_index_runs_once_and_within_its_loop(counts: tuple[int, int]):
    assert walk(Pool, partial(caller, Pool, *enumerate(counts)), helpers=2, sleeping=False) > 10_000


def test_nobody_sleeps_through_a_loop_or_for_ever():
    assert walk(Pool, partial(caller, Pool, (0, 2), (1, 3), (2, 2)), helpers=1, sleeping=True) > 5_000


def test_two_callers_both_get_their_loops_run():
    callers = [partial(caller, Pool, (number, 2), others=1) for number in (0, 1)]
    assert walk(Pool, *callers, helpers=1, sleeping=True) > 5_000


@pytest.mark.storm
@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_three_threads_that_may_sleep_run_each_index_once(counts: tuple[int, int]):
    assert walk(Pool, partial(caller, Pool, *enumerate(counts)), helpers=2, sleeping=True) > 100_000


@pytest.mark.parametrize("sleeping", [False, True])
def test_a_bound_beside_the_counter_is_seen_to_fail(sleeping: bool):
    """The walk can fail: this protocol held for millions of loops, and then did not."""
    with pytest.raises(Violation, match=r"index 2 of loop 1 runs twice"):
        walk(TicketAndCount, partial(caller, TicketAndCount, (0, 2), (1, 3)), helpers=1, sleeping=sleeping)


def test_a_wake_up_that_may_be_lost_is_seen_to_fail():
    """And it sees who is left asleep: here the caller looks for sleepers before it sets the counter."""

    class Careless(Pool):
        @staticmethod
        def run(loop: int, count: int) -> Thread:
            sleeping = yield load("sleeping")
            yield store("left", count)
            if sleeping:
                yield notify_all()
            yield store("woken", True)

    with pytest.raises(Violation, match="a helper sleeps through a loop"):
        walk(Careless, partial(caller, Careless, (0, 2)), helpers=1, sleeping=True)
