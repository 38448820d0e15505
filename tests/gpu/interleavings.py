"""Walks through every interleaving of a few threads that share memory, one access at a time.

A thread is a generator that yields what it does to shared memory, an `Op`, and is sent what that gave. It must have no
other memory than its local variables, which must be hashable, and do nothing that depends on more than these. Threads
take turns in all ways that there are; states that were seen before are not walked through again. Memory is sequentially
consistent here: an order that is weaker needs reasons of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any

Memory = dict[str, Any]
Thread = Generator["Op", Any, None]
BLOCKED = object()  # what an operation gives that has to wait


@dataclass(frozen=True)
class Op:
    """`act` changes memory and returns what the thread gets, or BLOCKED and changes nothing. `outcomes` are the
    possible results instead of an operation whose result is open, such as how long a thread spins."""

    act: Callable[[Memory], Any]
    outcomes: tuple[Any, ...] | None = None


class Violation(AssertionError):
    """What must not be, with the turns that led to it."""


def load(name: str) -> Op:
    return Op(lambda memory: memory[name])


def store(name: str, value: Hashable) -> Op:
    return Op(lambda memory: memory.__setitem__(name, value))


def add(name: str, change: int) -> Op:
    """Atomically; gives the value before."""

    def act(memory: Memory) -> int:
        before = memory[name]
        memory[name] = before + change
        return before

    return Op(act)


def exchange(name: str, value: Hashable) -> Op:
    def act(memory: Memory) -> Any:
        before, memory[name] = memory[name], value
        return before

    return Op(act)


def compare_exchange(name: str, expected: Hashable, value: Hashable) -> Op:
    """Gives whether it was so."""

    def act(memory: Memory) -> bool:
        if memory[name] != expected:
            return False
        memory[name] = value
        return True

    return Op(act)


def either() -> Op:
    """True in one world and False in the other."""
    return Op(lambda _: None, outcomes=(True, False))


def lock(name: str = "mutex") -> Op:
    def act(memory: Memory) -> Any:
        if memory[name]:
            return BLOCKED
        memory[name] = True
        return None

    return Op(act)


def unlock(name: str = "mutex") -> Op:
    return store(name, False)


def wait(me: str) -> Generator[Op, Any, None]:
    """A condition variable's: lets go of the mutex, sleeps until it is notified, and takes the mutex again."""

    def fall_asleep(memory: Memory) -> None:
        memory["mutex"] = False
        memory["asleep"] |= {me}

    yield Op(fall_asleep)
    yield Op(lambda memory: BLOCKED if me in memory["asleep"] else None)
    yield lock()


def notify_all() -> Op:
    return store("asleep", frozenset())


State = tuple[int, ...]  # the number of what memory holds, and of the place of each thread


class _Walker:
    """One thread. A place is where it stands, with its local variables; places are numbered as they are found."""

    def __init__(self, make: Callable[[], Thread]) -> None:
        self._make = make
        self._numbers: dict[Hashable, int] = {}
        self._results: list[tuple[Any, ...]] = []  # what brings a new generator to a place
        self._steps: dict[tuple[int, Hashable], int] = {}
        self.ops: list[Op | None] = []  # what it does next at a place; None: it has ended
        self.moves: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (memory, place) before and after
        self.enter(())

    def enter(self, results: tuple[Any, ...]) -> int:
        generator = self._make()
        op: Op | None = next(generator)
        try:
            for result in results:
                op = generator.send(result)
        except StopIteration:
            op = None
        where = None if op is None else _where(generator)
        if where not in self._numbers:
            self._numbers[where] = len(self.ops)
            self.ops.append(op)
            self._results.append(results)
        return self._numbers[where]

    def step(self, place: int, result: Hashable) -> int:
        if (place, result) not in self._steps:
            self._steps[place, result] = self.enter((*self._results[place], result))
        return self._steps[place, result]


class _Memories:
    """What memory may hold, numbered as it is found."""

    def __init__(self, first: Memory) -> None:
        self._names = list(first)
        self._numbers: dict[Hashable, int] = {}
        self._values: list[tuple[Any, ...]] = []
        self.number(first)

    def number(self, memory: Memory) -> int:
        values = tuple(memory.values())
        if values not in self._numbers:
            self._numbers[values] = len(self._values)
            self._values.append(values)
        return self._numbers[values]

    def at(self, number: int) -> Memory:
        return dict(zip(self._names, self._values[number], strict=True))


def explore(
    threads: dict[str, Callable[[], Thread]], memory: Memory, check: Callable[[Memory], None] = lambda _: None
) -> int:
    """Walk through all states. Returns how many there are.

    Raises Violation where an operation or `check` fails, or where from some state there is no way on which all threads
    end: for want of a turn, or in a circle.
    """
    walkers = [_Walker(make) for make in threads.values()]
    memories = _Memories(memory)

    def moves(walker: _Walker, number: int, place: int) -> list[tuple[int, int]]:
        """Memory and place after a thread's turn; more than one where its outcome is open, none where it has none."""
        op = walker.ops[place]
        if op is None:
            return []
        now = memories.at(number)
        result = op.act(now)
        check(now)
        if result is BLOCKED:
            return []
        after = memories.number(now)
        return [(after, walker.step(place, outcome)) for outcome in op.outcomes or (result,)]

    start: State = (0,) * (1 + len(walkers))
    before: dict[State, list[State]] = {start: []}  # from where each state was reached, the first one first
    ends, open_states = [], [start]
    while open_states:
        state = open_states.pop()
        number, *places = state
        if all(walker.ops[place] is None for walker, place in zip(walkers, places, strict=True)):
            ends.append(state)
        for index, walker in enumerate(walkers, 1):
            turn = number, state[index]
            found = walker.moves.get(turn)
            if found is None:
                try:
                    found = walker.moves[turn] = moves(walker, *turn)
                except AssertionError as error:
                    raise Violation(f"{error}; turns: {_path(before, start, state)}, {index - 1}") from None
            for after, place in found:
                reached = (after, *state[1:index], place, *state[index + 1 :])
                if reached in before:
                    before[reached].append(state)
                else:
                    before[reached] = [state]
                    open_states.append(reached)
    alive = set(ends)
    while ends:
        for state in before[ends.pop()]:
            if state not in alive:
                alive.add(state)
                ends.append(state)
    for state in before:
        if state not in alive:
            raise Violation(f"no way to the end; turns: {_path(before, start, state)}")
    return len(before)


def _where(generator: Any) -> Hashable:
    """Where a generator, and those it waits for, stand, and their local variables."""
    frames = []
    while generator is not None:
        frame = generator.gi_frame
        frames.append((frame.f_code, frame.f_lasti, tuple(frame.f_locals.items())))
        generator = generator.gi_yieldfrom
    return tuple(frames)


def _path(before: dict[State, list[State]], start: State, state: State) -> str:
    """Whose turns they were, from the start to a state, by the threads' numbers."""
    turns: list[str] = []
    while state != start:
        came_from = before[state][0]
        turns += [str(thread) for thread, (a, b) in enumerate(zip(came_from[1:], state[1:], strict=True)) if a != b]
        state = came_from
    return ", ".join(turns[::-1])
