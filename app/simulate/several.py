"""The simulation of several models that share memory and cores: the server's policy on the virtual clock.

1. `app.serving.model_policy` decides what is loaded and unloaded when. Here are only the times that this takes.
2. Each model has one engine. A step takes as many times longer as the engines that have work would use more cores than
   there are; loads slow no steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from app.config.settings import Settings, SettingsError
from app.config.several import settings_of_models
from app.serving.model_policy import ModelPolicy, ModelState, PooledModel, Waiter
from app.serving.model_pool import CHECK_SECONDS, memory_limit
from app.simulate.driver import AdmissionDoor, AdmittedPlace, Outcome, figures_of_steps, run_whole
from app.simulate.loads import WorkloadLoad
from app.simulate.machine import Machine, read_machine
from app.workload.datasets import WorkloadRequest
from app.workload.report import statistics
from engine.core.core import EngineCore
from engine.costs.table import StepLoad
from engine.messages import EngineCoreRequest
from engine.simulation.counting import CountingExecutor, DrawnCosts, VirtualClock
from engine.simulation.engines import Engines
from engine.simulation.simulation import Door, Simulation
from gpu.host import usable_cores
from protocol.errors import ApiError

LOAD_SECONDS = 1.0  # where it was not measured
UNLOAD_SECONDS = 0.1  # from the decision until the memory is free


class ModelFacts(NamedTuple):
    """One of several models before the simulation."""

    settings: Settings
    machine: Machine
    memory: int  # bytes, with its KV cache
    load_seconds: float


def read_models(
    settings: Settings, tables: Sequence[Path], num_blocks: int | None = None, load_seconds: float = 0.0
) -> list[ModelFacts]:
    """Return the models of these settings. `tables` are their files of step costs. `load_seconds` replaces what was
    measured, unless it is 0. Raises SettingsError."""
    models = []
    for own, table in zip(settings_of_models(settings), tables, strict=True):
        given = {name: getattr(own, name) for name in own.model_fields_set - {"kv_cache_memory"}}
        machine, merged = read_machine(table, Settings(**given | {"models": {}, "models_dir": None}), num_blocks)
        kv_cache, measured = own.kv_cache_memory or 0, merged.kv_cache_memory or 0  # of the engine that wrote the file
        if merged.data_parallel_size > 1:
            raise SettingsError(f"data_parallel_size: got {merged.data_parallel_size}; of several models allowed: 1")
        if (memory := own.memory or machine.memory) is None:
            raise SettingsError(
                f"models.{own.model_names[0]}: {table} does not say what memory it takes. What works: memory in the "
                "model's table, or a file that this version of the server wrote"
            )
        if own.memory is None:
            memory += kv_cache - measured
        if kv_cache and measured and num_blocks is None:
            machine = replace(machine, num_blocks=max(1, machine.num_blocks * kv_cache // measured))
        models.append(ModelFacts(merged, machine, memory, load_seconds or machine.load_seconds or LOAD_SECONDS))
    return models


def draw_models(requests: Iterable[WorkloadRequest], num_models: int, skew: float, seed: int) -> list[int]:
    """Return the index of each request's model. The n-th is drawn in proportion to 1 / n ** skew, for a conversation
    once."""
    draw, weights = random.Random(f"{seed} models"), [(n + 1) ** -skew for n in range(num_models)]
    drawn = [(request.conversation, draw.choices(range(num_models), weights)[0]) for request in requests]
    first: dict[int | None, int] = {}
    return [model if number is None else first.setdefault(number, model) for number, model in drawn]


def simulate_models(
    requests: Sequence[WorkloadRequest],
    owners: Sequence[int],
    models: Sequence[ModelFacts],
    settings: Settings,
    *,
    max_concurrency: int | None = None,
    watch: Callable[[Simulation], None] | None = None,
    seed: int | None = None,
) -> Outcome:
    """Serve a workload on the virtual clock. `owners` are the indices of the requests' models; `seed` is that of
    `simulate`. Raises SettingsError."""
    cores, device_seconds = usable_cores(), 0.0
    drawn: list[DrawnCosts] = []  # of each model

    def make_core(facts: ModelFacts, clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        machine, share = facts.machine, min(1.0, (facts.settings.num_threads or cores) / cores)
        drawn.append(costs := DrawnCosts(machine.table, settings.seed if seed is None else seed))

        def cost(load: StepLoad) -> float:
            nonlocal device_seconds
            seconds = costs(load)
            device_seconds += seconds * share
            return seconds * max(1.0, engines.num_busy * share)

        executor = machine.executor(clock, cost)
        config = machine.config(facts.settings)
        return EngineCore(config, executor, costs=machine.table, learns_costs=False, clock=clock), executor

    def owner(request: EngineCoreRequest) -> int:
        return owners[int(request.request_id)]

    engines = Engines([partial(make_core, facts) for facts in models], owner=owner)
    load = WorkloadLoad(requests, max_concurrency=max_concurrency, settings=settings)
    door = PoolDoor(models, memory_limit(settings), engines, owner)
    machine = models[0].machine  # of any: the times outside engines are the same
    simulation = Simulation(engines, load, lambda _: door, inbound=machine.inbound, outbound=machine.outbound)
    outcome = run_whole(simulation, load, sum(each.settings.max_num_seqs for each in models), watch)
    outcome.figures["device_utilization"] = device_seconds / max(simulation.now, 1e-9)
    outcome.figures.update(door.figures() | figures_of_steps(drawn))
    return outcome


class SimulatedModel(PooledModel):
    """The state of one model during a simulation."""

    def __init__(self, number: int, facts: ModelFacts, clock: Callable[[], float]) -> None:
        settings, machine = facts.settings, facts.machine
        super().__init__(settings.model_names[0], pinned=settings.pinned, idle_unload=settings.idle_unload)
        self.number = number
        self.facts = facts
        self.need = facts.memory
        self.door = AdmissionDoor(settings, clock, machine.table, machine.num_blocks * machine.block_size)
        self.num_requests = self.num_loads = self.num_refused = 0
        self.load_waits: list[float] = []  # seconds

    def figures(self) -> dict[str, Any]:
        """Return the model's part of the result."""
        counts = {"requests": self.num_requests, "loads": self.num_loads, "refused": self.num_refused}
        return counts | {"waited_for_load": len(self.load_waits)} | statistics("load_wait", self.load_waits)


class PoolDoor(Door):
    """Loads and unloads models for their requests, as `app.serving.model_pool` does, and then asks the admission of the
    request's model. Pinned models are loaded when the simulation begins."""

    def __init__(
        self, models: Sequence[ModelFacts], limit: int, engines: Engines, owner: Callable[[EngineCoreRequest], int]
    ) -> None:
        """`owner` returns the index of a request's model. Raises SettingsError if the pinned models do not fit."""
        self.models = [SimulatedModel(number, facts, lambda: engines.now) for number, facts in enumerate(models)]
        self.policy: ModelPolicy[SimulatedModel] = ModelPolicy(limit)
        self.policy.models = {each.name: each for each in self.models}
        self._engines = engines
        self._owner = owner
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()
        self._decided: list[tuple[EngineCoreRequest, Waiter[SimulatedModel]]] = []  # since the latest `look`
        self._next_plan = math.inf
        for model in self.models:
            if model.pinned:
                self.policy.loaded(model, engines.now, model.facts.memory, model.facts.load_seconds)
        if (used := self.policy.used) > limit:
            raise SettingsError(f"memory: got {limit} bytes; the pinned models need {used}")
        self._most_used = used

    @property
    def due(self) -> float:
        return min(self._events[0][0], self._next_plan) if self._events else self._next_plan

    def enter(self, request: EngineCoreRequest) -> AdmittedPlace | str | None:
        now, model = self._engines.now, self.models[self._owner(request)]
        model.num_requests += 1
        settings = model.facts.settings
        deadlines = [each for each in (request.deadline, request.first_token_deadline) if each is not None]
        deadline = min([*deadlines, now + settings.max_timeout])
        waiter = self.policy.enter(model, now, min(deadline, now + (settings.max_queue_time or math.inf)))
        if waiter.is_admitted:
            return self._admit(request, waiter)
        waiter.wake = lambda: self._decided.append((request, waiter))
        self._at(waiter.until, lambda: self._give_up(waiter, deadline))
        self._plan()
        return None

    def look(self, now: float) -> Iterable[tuple[EngineCoreRequest, AdmittedPlace | str]]:
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()
        if now >= self._next_plan:
            self._plan()
        while self._decided:  # a refusal by the admission may decide on more
            request, waiter = self._decided.pop(0)
            if isinstance(error := waiter.error, ApiError):
                waiter.model.num_refused += 1
                yield request, f"HTTP {error.status} {error.code}"
            else:
                waiter.model.load_waits.append(now - waiter.since)
                yield request, self._admit(request, waiter)

    def figures(self) -> dict[str, Any]:
        """Return what the models did, for the result."""
        waits = [seconds for each in self.models for seconds in each.load_waits]
        return {
            "memory_limit": self.policy.limit,
            "most_memory_used": self._most_used,
            "loads": sum(each.num_loads for each in self.models),
            "models": {each.name: each.figures() for each in self.models},
        } | statistics("load_wait", waits)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def _admit(self, request: EngineCoreRequest, waiter: Waiter[SimulatedModel]) -> AdmittedPlace | str:
        place = waiter.model.door.enter(request)
        if isinstance(place, str):
            waiter.model.num_refused += 1
            self._leave(waiter)
        else:
            place.scope.callback(self._leave, waiter)
        return place

    def _leave(self, waiter: Waiter[SimulatedModel]) -> None:
        self.policy.leave(waiter, self._engines.now)
        self._plan()

    def _give_up(self, waiter: Waiter[SimulatedModel], deadline: float) -> None:
        """Refuse a request that still waits, unless its model is being loaded before the deadline."""
        if waiter not in self.policy.waiting:
            return
        if waiter.model.state is ModelState.LOADING and self._engines.now < deadline:
            self._at(deadline, lambda: self._give_up(waiter, deadline))
            return
        waiter.error = ApiError(503, "The model could not be loaded in time.", code="model_not_loaded")
        waiter.wake()
        self._leave(waiter)

    def _plan(self) -> None:
        now, policy = self._engines.now, self.policy
        for waiter in list(policy.waiting):
            if policy.is_impossible(waiter.model):
                policy.refuse(waiter.model, ApiError(503, "The model does not fit.", code="model_too_large"))
        changes = policy.plan(now)
        for model in changes.unload:
            self._at(now + UNLOAD_SECONDS, partial(self._unloaded, model))
        for model in changes.load:
            model.num_loads += 1
            self._at(now + model.facts.load_seconds, partial(self._loaded, model, model.num_loads))
        self._most_used = max(self._most_used, policy.used)
        is_timed = bool(policy.waiting) or any(each.idle_unload < math.inf for each in self.models)
        self._next_plan = now + CHECK_SECONDS if is_timed else math.inf

    def _loaded(self, model: SimulatedModel, number: int) -> None:
        if model.state is ModelState.LOADING and model.num_loads == number:  # it may have been given up
            self.policy.loaded(model, self._engines.now, model.facts.memory, model.facts.load_seconds)
            self._plan()

    def _unloaded(self, model: SimulatedModel) -> None:
        self.policy.unloaded(model)
        self._engines.reset(model.number)
        self._plan()
