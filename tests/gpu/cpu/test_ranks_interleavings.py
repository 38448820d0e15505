"""The barrier of gpu/cpu/csrc/ranks.h in all interleavings of its steps: `Ranks`, kept like it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from tests.gpu.interleavings import BLOCKED, Memory, Op, Thread, Violation, add, either, explore, load, store

LOST = 9  # which rank is, where one is
Waiting = Generator[Op, Any, bool]


def memory_of(size: int) -> Memory:
    words: Memory = {"lost": None, "asleep": frozenset(), "left": frozenset()}
    for rank in range(size):
        words |= {f"arrived {rank}": 0, f"sleeping {rank}": 0, f"bell {rank}": 0}
    return words


def ring(rank: int) -> Thread:
    yield add(f"bell {rank}", 1)
    yield Op(lambda memory: memory.__setitem__("asleep", memory["asleep"] - {rank}))


def futex_wait(rank: int, bell: int) -> Thread:
    def fall_asleep(memory: Memory) -> None:
        if memory[f"bell {rank}"] == bell:  # as the kernel does it: looks and sleeps in one
            memory["asleep"] |= {rank}

    yield Op(fall_asleep)
    yield Op(lambda memory: BLOCKED if rank in memory["asleep"] else None)


class Ranks:
    @staticmethod
    def arrive(me: int, size: int, epoch: int) -> Thread:
        yield store(f"arrived {me}", epoch)
        for other in range(size):
            if other != me and (yield load(f"sleeping {other}")):
                yield from ring(other)

    @classmethod
    def wait_for(cls, me: int, other: int, epoch: int) -> Waiting:
        """Gives whether it has come."""
        while True:
            if (yield load(f"arrived {other}")) >= epoch:
                return True
            if (yield load("lost")) is not None:
                return False
            if (yield either()):  # spin on
                continue
            bell = yield load(f"bell {me}")
            yield from cls.sleep(me, other, epoch, bell)

    @staticmethod
    def sleep(me: int, other: int, epoch: int, bell: int) -> Thread:
        yield store(f"sleeping {me}", 1)
        there = (yield load(f"arrived {other}")) >= epoch
        if not there and (yield load("lost")) is None:
            yield from futex_wait(me, bell)
        yield store(f"sleeping {me}", 0)


def rank(kind: type[Ranks], me: int, size: int, barriers: int) -> Thread:
    yield load("lost")  # a thread does something, also one that never comes
    for epoch in range(1, barriers + 1):
        yield from kind.arrive(me, size, epoch)
        for other in range(size):
            if other != me and not (yield from kind.wait_for(me, other, epoch)):
                assert (yield load("lost")) is not None
                return
        yield Op(partial(leave, epoch=epoch, size=size))


def leave(memory: Memory, epoch: int, size: int) -> None:
    assert all(memory[f"arrived {other}"] >= epoch for other in range(size)), f"a rank left barrier {epoch} alone"


def watcher(size: int) -> Thread:
    yield store("lost", LOST)
    for each in range(size):
        yield from ring(each)


def walk(kind: type[Ranks], size: int, barriers: list[int], *, watched: bool = False) -> int:
    threads: dict[str, Callable[[], Thread]] = {
        f"rank {me}": partial(rank, kind, me, size, count) for me, count in enumerate(barriers)
    }
    if watched:
        threads["watcher"] = partial(watcher, size)
    return explore(threads, memory_of(size))


def test_no_rank_leaves_alone_or_sleeps_for_ever():
    assert walk(Ranks, 2, [3, 3]) > 500


def test_of_three_ranks_that_sleep_at_once_none_sleeps_for_ever():
    class Sleepers(Ranks):
        @classmethod
        def wait_for(cls, me: int, other: int, epoch: int) -> Waiting:
            while (yield load(f"arrived {other}")) < epoch:
                bell = yield load(f"bell {me}")
                yield from cls.sleep(me, other, epoch, bell)
            return True

    assert walk(Sleepers, 3, [1, 1, 1]) > 500


@pytest.mark.parametrize("barriers", [[2, 1], [0, 2]])
def test_no_rank_waits_for_one_that_is_said_to_be_lost(barriers: list[int]):
    """The one with fewer barriers has gone."""
    assert walk(Ranks, 2, barriers, watched=True) > 100


def test_a_bell_that_is_read_too_late_is_seen_to_fail():
    """The walk can fail: here who sleeps looks for the others before it reads its bell."""

    class Late(Ranks):
        @staticmethod
        def sleep(me: int, other: int, epoch: int, bell: int) -> Thread:
            yield store(f"sleeping {me}", 1)
            there = (yield load(f"arrived {other}")) >= epoch
            if not there:
                yield from futex_wait(me, (yield load(f"bell {me}")))
            yield store(f"sleeping {me}", 0)

    with pytest.raises(Violation, match="no way to the end"):
        walk(Late, 2, [1, 1])


def test_a_sleeper_that_is_looked_for_too_early_is_seen_to_fail():
    class Early(Ranks):
        @staticmethod
        def arrive(me: int, size: int, epoch: int) -> Thread:
            sleeping: tuple[int, ...] = ()
            for other in range(size):
                if other != me and (yield load(f"sleeping {other}")):
                    sleeping = (*sleeping, other)
            yield store(f"arrived {me}", epoch)
            for other in sleeping:
                yield from ring(other)

    with pytest.raises(Violation, match="no way to the end"):
        walk(Early, 2, [1, 1])
