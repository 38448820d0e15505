"""The policy of several models, in virtual time: what it never does, and that no request waits for ever."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serving.model_policy import LEAST_RESIDENCE, ModelPolicy, ModelState, PooledModel, Waiter

LOAD, UNLOAD, TICK = 1.0, 0.25, 0.25  # seconds


@dataclass
class Request:
    arrival: float
    model: int
    seconds: float
    patience: float
    is_row: bool = False


@dataclass
class Outcome:
    request: Request
    waited: float | None = None  # None: not admitted in time
    refused: bool = False
    num_ahead: int = 0  # other models that requests waited for at its arrival


class World:
    """Requests, loads and unloads at their times, and the invariants at each of them."""

    def __init__(self, needs: Sequence[int], limit: int, *, pinned: Sequence[int] = (), load: float = LOAD) -> None:
        self.policy: ModelPolicy[PooledModel] = ModelPolicy(limit)
        for number, need in enumerate(needs):
            model = PooledModel(str(number), pinned=number in pinned)
            model.need = need
            self.policy.models[model.name] = model
        self.load = load
        self.now = 0.0
        self.loads: list[tuple[float, str]] = []
        self.outcomes: list[Outcome] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), what))

    def run(self, requests: Sequence[Request], until: float = 1000.0) -> list[Outcome]:
        for request in requests:
            self.at(request.arrival, partial(self._arrive, request))
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._plan()
            if self.policy.waiting and not any(each[2] == self._tick for each in self._events):
                self.at(self.now + TICK, self._tick)
        return self.outcomes

    def _tick(self) -> None:
        """Let time pass, as the pool does."""

    def _arrive(self, request: Request) -> None:
        model = self.policy.models[str(request.model)]
        ahead = {each.model.name for each in self.policy.waiting} - {model.name}
        outcome = Outcome(request, num_ahead=len(ahead))
        self.outcomes.append(outcome)
        waiter = self.policy.enter(model, self.now, self.now + request.patience, is_row=request.is_row)

        def admitted() -> None:
            if waiter.error is not None:
                outcome.refused = True
                return
            outcome.waited = self.now - request.arrival
            assert model.state is ModelState.LOADED
            self.at(self.now + request.seconds, lambda: self.policy.leave(waiter, self.now))

        waiter.wake = admitted
        if waiter.is_admitted:
            admitted()
        else:
            self.at(waiter.until, lambda: None if waiter.is_admitted else self.policy.leave(waiter, self.now))

    def _plan(self) -> None:
        busy = {name for name, each in self.policy.models.items() if each.in_use}
        changes = self.policy.plan(self.now)
        for model in changes.unload:
            assert model.name not in busy, "a model with requests was unloaded"
            assert not model.pinned
            self.at(self.now + UNLOAD, partial(self.policy.unloaded, model))
        for model in changes.load:
            self.loads.append((self.now, model.name))
            self.at(self.now + self.load, partial(self._loaded, model))
        assert self.policy.used <= self.policy.limit

    def _loaded(self, model: PooledModel) -> None:
        if model.state is ModelState.LOADING:
            assert model.need is not None
            self.policy.loaded(model, self.now, model.need, self.load)


REQUESTS = st.lists(
    st.builds(
        Request,
        arrival=st.floats(0, 60),
        model=st.integers(0, 4),
        seconds=st.floats(0.01, 20),
        patience=st.sampled_from([2.0, 30.0, 300.0]),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(requests=REQUESTS, needs=st.lists(st.integers(1, 10), min_size=5, max_size=5), limit=st.integers(10, 30))
def test_every_request_that_can_wait_is_served(requests: list[Request], needs: list[int], limit: int) -> None:
    world = World(needs, limit)
    for outcome in world.run(requests):
        waits_long = outcome.request.patience == 300.0
        assert outcome.waited is not None or not waits_long, "five models take turns of seconds"
        assert outcome.waited is None or outcome.waited <= outcome.request.patience
    assert not world.policy.waiting
    assert all(each.in_use == 0 for each in world.policy.models.values())


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            Request,
            arrival=st.floats(0, 30) | st.integers(0, 10),
            model=st.integers(0, 4),
            seconds=st.floats(0.01, 3),
            patience=st.just(900.0),
        ),
        max_size=60,
    ),
    needs=st.lists(st.integers(1, 10), min_size=5, max_size=5),
    limit=st.integers(10, 20),
)
def test_no_request_waits_for_more_turns_than_models_wait_before_it(
    requests: list[Request], needs: list[int], limit: int
) -> None:
    """And for one turn more, in which its model gets its own: in a turn, a model stays for its residence,
    finishes its requests and leaves, and another one is loaded."""
    turn = max(LEAST_RESIDENCE, LOAD) + 3 + UNLOAD + LOAD + 2 * TICK
    for outcome in World(needs, limit).run(requests):
        assert outcome.waited is not None
        assert outcome.waited <= (outcome.num_ahead + 1) * turn


def test_an_idle_model_makes_room_before_the_end_of_its_residence() -> None:
    world = World([10, 10], 10, load=8.0)
    _, other = world.run([Request(0, 0, 0.1, 60), Request(1, 1, 0.1, 60)])
    assert other.waited is not None
    assert other.waited <= 8.0 + 0.1 - 1 + 2.0 + TICK + UNLOAD + 8.0, "a load, a quarter of a residence, and a load"


def test_a_pinned_model_stays_and_others_take_turns_in_the_rest() -> None:
    world = World([6, 4, 4], 10, pinned=[0])
    every = [Request(0.0, 0, 0.1, 30), *(Request(1.0 + n, 1 + n % 2, 0.1, 30) for n in range(8))]
    assert all(outcome.waited is not None for outcome in world.run(every))
    assert [name for _, name in world.loads].count("0") == 1


def test_models_that_fit_side_by_side_are_never_unloaded() -> None:
    world = World([5, 5], 10)
    world.run([Request(n * 0.5, n % 2, 0.2, 30) for n in range(100)])
    assert len(world.loads) == 2


def test_the_least_recently_used_model_goes_first() -> None:
    world = World([5, 5, 5], 10)
    world.run([Request(0, 0, 0.1, 30), Request(1, 1, 0.1, 30), Request(20, 0, 0.1, 30), Request(30, 2, 0.1, 30)])
    assert world.policy.models["1"].state is ModelState.UNLOADED
    assert world.policy.models["0"].state is ModelState.LOADED


def test_idle_models_make_room_for_one_that_takes_more_than_was_expected() -> None:
    policy: ModelPolicy[PooledModel] = ModelPolicy(10)
    policy.models = {name: PooledModel(name, pinned=name == "pinned") for name in ("pinned", "old", "recent", "large")}
    needs = {"pinned": 1, "old": 2, "recent": 2, "large": 5}
    for now, (name, need) in enumerate(needs.items()):
        policy.models[name].need = need
        policy.loaded(policy.models[name], float(now), need, 1.0)
    assert policy.plan(4.0).unload == []
    policy.loaded(policy.models["large"], 5.0, 7, 1.0)
    assert policy.plan(5.0).unload == [policy.models["old"]]
    assert policy.plan(5.0).unload == [], "it is on its way out"
    policy.unloaded(policy.models["old"])
    assert policy.used == 10


@pytest.mark.parametrize("load", [1.0, 8.0])
def test_two_models_that_take_turns_are_swapped_seldom(load: float) -> None:
    """One request each second, in turns: without a residence there would be a load for each."""
    world = World([10, 10], 10, load=load)
    world.run([Request(n, n % 2, 0.1, 60) for n in range(120)])
    residence = max(1.0, load)
    assert all(outcome.waited is not None for outcome in world.outcomes)
    assert len(world.loads) <= 2 + world.now / (residence + load)


def test_a_busy_model_gives_its_room_up_after_its_turn() -> None:
    """Two clients of one model that overlap for ever: a request for another one is served all the same."""
    world = World([10, 10], 10)
    forever = [Request(n * 0.5, 0, 0.9, 300) for n in range(200)]
    (other,) = [each for each in world.run([*forever, Request(20.2, 1, 0.1, 30)]) if each.request.model == 1]
    assert other.waited is not None
    assert other.waited < 10


def test_rows_of_batches_do_not_take_the_room_of_a_model_that_other_requests_use() -> None:
    world = World([10, 10], 10)
    used = [Request(n * 5.0, 0, 0.9, 30) for n in range(40)]
    outcomes = world.run([*used, *(Request(10.0 + n, 1, 2.0, 600, is_row=True) for n in range(20))])
    waits = [outcome.waited for outcome in outcomes if not outcome.request.is_row]
    assert waits == [LOAD, *[0.0] * 39], "rows are not noticed"
    assert [name for _, name in world.loads] == ["0", "1"]
    assert world.loads[1][0] > used[-1].arrival + 60
    assert all(outcome.waited is not None for outcome in outcomes), "and run when the server has time"


def test_rows_of_batches_take_turns_among_themselves_and_make_room_for_other_requests() -> None:
    world = World([10, 10, 10], 10)
    rows = [Request(n * 0.5, n % 2, 0.9, 60, is_row=True) for n in range(100)]
    outcomes = world.run([*rows, Request(20.2, 2, 0.1, 30)])
    (other,) = (outcome.waited for outcome in outcomes if not outcome.request.is_row)
    assert other is not None
    assert other < LOAD + UNLOAD + 3
    assert all(outcome.waited is not None for outcome in outcomes[:20])


def test_a_turn_ends_sooner_for_a_request_with_little_time() -> None:
    world = World([10, 10], 10)
    first = Request(0, 0, 0.1, 30)
    (_, late) = world.run([first, Request(4.0, 1, 0.1, 3.5)])
    assert late.waited is not None


def test_a_failing_model_is_tried_again_after_pauses_that_grow() -> None:
    policy: ModelPolicy[PooledModel] = ModelPolicy(10)
    model = PooledModel("a")
    model.need = 5
    policy.models["a"] = model
    pauses = []
    now = 0.0
    for _ in range(9):
        waiter: Waiter[PooledModel] = policy.enter(model, now, now + 100)
        assert policy.plan(now).load == [model]
        policy.failed(model, now, RuntimeError("broken"))
        assert str(waiter.error) == "broken"
        pauses.append(model.retry_at - now)
        assert not policy.plan(now).load
        now = model.retry_at
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_model_without_requests_goes_after_its_idle_time_and_a_pinned_one_stays() -> None:
    policy: ModelPolicy[PooledModel] = ModelPolicy(10)
    for name in ("idle", "pinned"):
        model = PooledModel(name, pinned=name == "pinned", idle_unload=60)
        policy.models[name] = model
        policy.loaded(model, 0.0, 1, 1.0)
    assert not policy.plan(59.0).unload
    assert [each.name for each in policy.plan(60.0).unload] == ["idle"]


def test_an_idle_time_that_a_client_asked_for_lasts_until_the_model_is_loaded_again() -> None:
    policy: ModelPolicy[PooledModel] = ModelPolicy(10)
    model = policy.models["m"] = PooledModel("m", idle_unload=60)
    policy.loaded(model, 0.0, 1, 1.0)
    model.idle_unload = 5.0
    assert policy.plan(5.0).unload == [model]
    policy.unloaded(model)
    policy.loaded(model, 10.0, 1, 1.0)
    assert not policy.plan(69.0).unload
    assert policy.plan(70.0).unload == [model]


def test_models_make_room_in_the_memory_of_the_host_too() -> None:
    policy: ModelPolicy[PooledModel] = ModelPolicy(100, host_limit=10)
    for number, host_need in enumerate((0, 6, 5, 11)):
        model = PooledModel(str(number))
        model.need, model.host_need = 10, host_need
        policy.models[model.name] = model
    other, first, waiting, large = policy.models.values()
    for model in (other, first):
        model.state, model.loaded_at, model.last_used = ModelState.LOADED, -100.0, -100.0
    policy.enter(waiting, 0.0, 100.0)
    changes = policy.plan(0.0)
    assert (changes.load, changes.unload) == ([], [first]), "the other one holds nothing of the host's memory"
    policy.unloaded(first)
    assert policy.plan(0.0).load == [waiting]
    assert policy.is_impossible(large)
