"""One simulation of a workload from beginning to end, and what is to be said of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.report import RequestRecord, summarize
from app.bench.workloads import WorkloadRequest
from app.garbage import no_collection
from app.settings import Settings, SettingsError
from app.simulate.door import AdmissionDoor
from app.simulate.loads import WorkloadLoad
from app.simulate.machine import Machine
from engine.core.core import EngineCore
from engine.routing.router import Route
from engine.simulation.clock import VirtualClock
from engine.simulation.counting import CountingExecutor
from engine.simulation.engines import Engines
from engine.simulation.simulation import Outage, SimulatedRequest, Simulation

STEPS_AT_ONCE = 50  # fewer than an engine remembers (`engine.core.core.NUM_STEPS_KEPT`), so that each is seen


@dataclass(frozen=True)
class Outcome:
    """What the clients saw, and what the engines did for them."""

    records: list[RequestRecord]
    requests: list[SimulatedRequest]  # those that were sent, in the order of their ends
    figures: dict[str, Any]

    def result(self, **options: Any) -> dict[str, Any]:
        """As `app.bench.report.summarize` gives it of a real run, with `figures` beside."""
        return summarize(self.records, **options) | self.figures


def simulate(
    requests: Sequence[WorkloadRequest],
    machine: Machine,
    settings: Settings,
    *,
    max_concurrency: int | None = None,
    replicas: int | None = None,
    route: Route = "prefix",
    outages: Sequence[Outage] = (),
    watch: Callable[[Simulation], None] | None = None,
) -> Outcome:
    """Serve a workload on the virtual clock. `watch` is called now and then, before any step is forgotten.

    `replicas`: as `data_parallel_size`, if it is given; `route`: how they share the requests; `outages`: when some of
    them are not there.

    Raises SettingsError.
    """
    if replicas is not None:
        settings = settings.model_copy(update={"data_parallel_size": replicas})
    size = settings.data_parallel_size
    load = WorkloadLoad(requests, max_concurrency=max_concurrency, settings=settings)

    def make_core(clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        executor = machine.executor(clock)
        core = EngineCore(machine.config(settings), executor, costs=machine.table, learns_costs=False, clock=clock)
        return core, executor

    try:
        engines = Engines(make_core, size, leaps=watch is None, route=route)
    except ValueError as error:  # no request of the longest would fit
        raise SettingsError(f"--num-blocks: {error}") from None
    simulation = Simulation(
        engines,
        load,
        lambda clock: AdmissionDoor(settings, clock, machine.table, machine.num_blocks * machine.block_size * size),
        inbound=machine.inbound,
        outbound=machine.outbound,
        outages=outages,
    )
    began = time.perf_counter()
    with no_collection():  # what a simulation keeps, it keeps to its end
        while simulation.advance(max_steps=None if watch is None else STEPS_AT_ONCE):
            if watch is not None:
                watch(simulation)
    if watch is not None:
        watch(simulation)
    host_seconds = max(time.perf_counter() - began, 1e-9)
    executors = [replica.executor for replica in engines.replicas]
    slot_seconds = max(simulation.now * settings.max_num_seqs * len(executors), 1e-9)
    figures = {
        "simulated_seconds": simulation.now,
        "simulation_speed": simulation.now / host_seconds,  # simulated seconds per second
        "num_steps": simulation.num_steps,
        "num_preemptions": simulation.num_preemptions,
        "prefix_cache_queries": simulation.prefix_cache_queries,
        "prefix_cache_hits": simulation.prefix_cache_hits,
        "slot_utilization": sum(executor.row_seconds for executor in executors) / slot_seconds,
        "device_utilization": sum(executor.busy_seconds for executor in executors)
        / max(simulation.now * len(executors), 1e-9),
    }
    if size > 1:
        figures["uncached_tokens_max_by_mean"] = engines.imbalance
        figures["num_placed_again"] = simulation.num_placed_again
    return Outcome(load.records, list(simulation.ended), figures)
