"""Runs simulations: `simulate` a whole workload, `Session` an open load with parameters that change while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import numpy as np
from pydantic import Field

from app.admission.admission import Admission, QueueTicket
from app.admission.tenants import ANONYMOUS
from app.config.settings import Settings, SettingsError
from app.observability.frames import make_frame
from app.runtime import no_collection
from app.simulate.loads import LoadShape, OpenLoad, WorkloadLoad
from app.simulate.machine import Machine
from app.workload.datasets import WorkloadRequest
from app.workload.report import RequestRecord, summarize
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.costs.table import StepCostTable
from engine.messages import EngineCoreRequest
from engine.routing.router import Route
from engine.simulation.counting import CountingExecutor, DrawnCosts, VirtualClock
from engine.simulation.engines import Engines
from engine.simulation.simulation import Door, Outage, SimulatedRequest, Simulation
from protocol.errors import ApiError

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2**15
KEPT, KEPT_TOKENS = 10_000, 2**20  # finished requests and their output tokens, kept for percentiles


class Parameters(LoadShape):
    """The parameters of a session."""

    step_seconds: float = Field(default=0.015, ge=0.0001, le=10)
    max_num_seqs: int = Field(default=8, ge=1, le=256)
    max_num_batched_tokens: int = Field(default=512, ge=256, le=16384)
    admission: bool = False  # refuse as the server would; without it the queue may grow without bound
    num_blocks: int = Field(default=4096, ge=64, le=2**17)  # of 16 tokens; lengths are cut so that one request fits
    seed: int = Field(default=0, ge=0, le=2**31)


_TOKENS_PER_BLOCK, _TOKENS_PER_REQUEST = 8, 32  # the memory of a block and of a request, in tokens

FIXED = ("num_blocks", "seed", "admission")  # parameters that cannot change while it runs

_COMFORTABLE = Parameters(rate=3, max_num_seqs=8, step_seconds=0.015, output_len=40)
PRESETS = {
    "comfortable": _COMFORTABLE,
    "overloaded": _COMFORTABLE.model_copy(update={"rate": 8.0, "max_num_seqs": 4}),
    "one slot": _COMFORTABLE.model_copy(update={"rate": 2.0, "max_num_seqs": 1, "output_len": 24.0}),
    "bursts": _COMFORTABLE.model_copy(update={"burstiness": 0.1, "max_num_seqs": 4}),
    "long prompts": _COMFORTABLE.model_copy(update={"input_len": 800.0, "max_num_batched_tokens": 256, "rate": 4.0}),
}
"""The presets. With answers of 40 tokens at 15 ms, 8 slots serve 13 requests a second, 4 slots 6.7, so that 8 a second
wait ever longer. One slot serves 2.8 answers of 24 tokens a second: 2 a second fit, with a long tail (p99)."""


class Session:
    """One simulation of an open load. A step takes about 0.1 to 0.5 ms of the caller's thread."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._longest = min(MAX_MODEL_LEN, parameters.num_blocks * BLOCK_SIZE)
        self.load = OpenLoad(lambda: self.parameters, self._longest, parameters.seed)
        settings = Settings().model_copy(update={"max_num_seqs": parameters.max_num_seqs})
        door = (lambda clock: AdmissionDoor(settings, clock)) if parameters.admission else None
        self.simulation = Simulation(Engines([self._make_core]), self.load, door, keep=KEPT, keep_tokens=KEPT_TOKENS)
        self._begin_account()

    def _make_core(self, clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        num_blocks, step_seconds = self.parameters.num_blocks, lambda _: self.parameters.step_seconds
        self._executor = CountingExecutor(num_blocks, BLOCK_SIZE, step_seconds, clock=clock, sleep=clock.sleep)
        config = EngineConfig(
            max_model_len=self._longest,
            max_num_seqs=self.parameters.max_num_seqs,
            max_num_batched_tokens=self.parameters.max_num_batched_tokens,
        )
        return EngineCore(config, self._executor, clock=clock), self._executor

    @property
    def core(self) -> EngineCore:
        return self.simulation.engines.replicas[0].core

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.simulation.now

    def change(self, /, **changes: Any) -> None:
        """Change parameters from now on and reset the averages. Raises ValueError (pydantic's included)."""
        if fixed := [name for name in changes if name in FIXED]:
            raise ValueError(f"{fixed[0]}: cannot change while it runs; allowed: a new simulation")
        parameters = Parameters.model_validate(self.parameters.model_dump() | changes)
        self.load.change(self.now, lambda: setattr(self, "parameters", parameters))
        self.core.scheduler.reconfigure(
            max_num_seqs=parameters.max_num_seqs, max_num_batched_tokens=parameters.max_num_batched_tokens
        )
        self._begin_account()

    def advance(self, until: float = math.inf, max_steps: int = 1000, max_work: float = math.inf) -> None:
        """Simulate up to the virtual time `until`, in at most `max_steps` steps; no step begins after `max_work`.
        Raises ValueError if too many requests are unfinished to keep in memory; the session cannot go on then."""
        self.simulation.advance(until, max_steps, max_work)

    @property
    def kept_tokens(self) -> int:
        """Return the memory of the session in tokens of about 50 bytes."""
        blocks, requests = self.parameters.num_blocks, len(self.simulation.open) + len(self.simulation.ended)
        tokens = self.load.open_tokens + self.simulation.kept_tokens
        return tokens + _TOKENS_PER_BLOCK * blocks + _TOKENS_PER_REQUEST * requests

    # --- figures

    def _begin_account(self) -> None:
        simulation = self.simulation
        self._began = simulation.now
        self._at_begin = (simulation.request_seconds, self._executor.row_seconds, simulation.num_ended)

    def kpis(self) -> Mapping[str, float]:
        """Return figures since the latest change. `little` is λW, which converges to `num_in_system`, L."""
        simulation = self.simulation
        seconds = max(simulation.now - self._began, 1e-9)
        request_seconds, row_seconds, num_ended = self._at_begin
        count = simulation.num_ended - num_ended
        recent: list[SimulatedRequest] = list(simulation.ended)[-count:] if count else []
        served = [each for each in recent if each.token_times]
        first = [each.token_times[0] - each.start_time for each in served]
        p50, p99 = np.percentile(first or [0.0], (50, 99)).tolist()
        num_tokens = sum(len(each.token_times) for each in served)
        whole = [each.end_time - each.start_time for each in recent if each.end_time is not None]
        arrival_rate, mean_seconds = count / seconds, sum(whole) / max(len(whole), 1)
        return {
            "seconds": seconds,
            "num_sent": simulation.num_sent,
            "num_ended": simulation.num_ended,
            "num_refused": simulation.num_refused,
            "num_running": len(self.core.scheduler.running),
            "num_waiting": len(self.core.scheduler.waiting),
            "num_preemptions": simulation.num_preemptions,
            "utilization": (self._executor.row_seconds - row_seconds) / seconds / self.parameters.max_num_seqs,
            "num_in_system": (simulation.request_seconds - request_seconds) / seconds,
            "request_rate": arrival_rate,
            "mean_seconds": mean_seconds,
            "little": arrival_rate * mean_seconds,
            "output_tokens_per_second": num_tokens / seconds * (count / max(len(recent), 1)),
            "ttft_p50": p50,
            "ttft_p99": p99,
        }


# ------------------------------------------------------------------------------------------------------------------ run
# One simulation of a workload from beginning to end, and its figures.


STEPS_AT_ONCE = 50  # fewer than an engine keeps (`engine.core.core.NUM_STEPS_KEPT`), so that none is missed


@dataclass(frozen=True)
class Outcome:
    """The records of a simulated workload and the figures of its engines."""

    records: list[RequestRecord]
    requests: list[SimulatedRequest]  # those that were sent, in the order in which they ended
    figures: dict[str, Any]

    def result(self, **options: Any) -> dict[str, Any]:
        """Return the result of `app.workload.report.summarize`, as of a real run, with `figures`."""
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
    seed: int | None = None,
) -> Outcome:
    """Serve a workload on the virtual clock.

    `replicas` overrides `data_parallel_size`; `route` is how they share requests; `outages` are times without some of
    them. `watch` is called often enough to see every step. `seed` is that of the draws from the spread of step costs,
    by default the setting. Raises SettingsError.
    """
    if replicas is not None:
        settings = settings.model_copy(update={"data_parallel_size": replicas})
    size = settings.data_parallel_size
    load = WorkloadLoad(requests, max_concurrency=max_concurrency, settings=settings)
    costs = DrawnCosts(machine.table, settings.seed if seed is None else seed)

    def make_core(clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        executor = machine.executor(clock, costs)
        core = EngineCore(machine.config(settings), executor, costs=machine.table, learns_costs=False, clock=clock)
        return core, executor

    try:
        engines = Engines([make_core] * size, leaps=watch is None, route=route)
    except ValueError as error:  # the longest request would not fit
        raise SettingsError(f"--num-blocks: {error}") from None
    simulation = Simulation(
        engines,
        load,
        lambda clock: AdmissionDoor(settings, clock, machine.table, machine.num_blocks * machine.block_size * size),
        inbound=machine.inbound,
        outbound=machine.outbound,
        outages=outages,
    )
    outcome = run_whole(simulation, load, settings.max_num_seqs * size, watch)
    outcome.figures.update(figures_of_steps([costs]))
    if size > 1:
        outcome.figures["uncached_tokens_max_by_mean"] = engines.imbalance
        outcome.figures["num_placed_again"] = simulation.num_placed_again
    return outcome


def run_whole(
    simulation: Simulation, load: WorkloadLoad, num_slots: int, watch: Callable[[Simulation], None] | None
) -> Outcome:
    """Run a simulation to its end. `num_slots`: `max_num_seqs` of all engines together."""
    began = time.perf_counter()
    with no_collection():  # a simulation keeps its objects to its end
        while simulation.advance(max_steps=None if watch is None else STEPS_AT_ONCE):
            if watch is not None:
                watch(simulation)
    if watch is not None:
        watch(simulation)
    host_seconds = max(time.perf_counter() - began, 1e-9)
    executors = [replica.executor for replica in simulation.engines.replicas]
    slot_seconds = max(simulation.now * num_slots, 1e-9)
    device_seconds = max(simulation.now * len(executors), 1e-9)
    figures = {
        "simulated_seconds": simulation.now,
        "simulation_speed": simulation.now / host_seconds,  # simulated seconds per second
        "num_steps": simulation.num_steps,
        "num_preemptions": simulation.num_preemptions,
        "prefix_cache_queries": simulation.prefix_cache_queries,
        "prefix_cache_hits": simulation.prefix_cache_hits,
        "slot_utilization": sum(executor.row_seconds for executor in executors) / slot_seconds,
        "device_utilization": sum(executor.busy_seconds for executor in executors) / device_seconds,
    }
    return Outcome(load.records, list(simulation.ended), figures)


def figures_of_steps(costs: Sequence[DrawnCosts]) -> dict[str, Any]:
    """Return whether steps were drawn from a spread, and by curve of the table the largest size that was simulated
    without a measure, and the share of such steps in the time of all steps."""
    seconds = max(sum(each.seconds for each in costs), 1e-9)
    found: dict[str, tuple[int, float]] = {}
    for each in costs:
        for name, (own, size) in each.unmeasured.items():
            largest, share = found.get(name, (0, 0.0))
            found[name] = max(largest, size), share + own / seconds
    return {"has_spread": all(each.has_spread for each in costs), "unmeasured": found}


# ----------------------------------------------------------------------------------------------------------------- door
# The server's admission on the virtual clock.


class AdmissionDoor(Door):
    """Admits a request if the server would."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        table: StepCostTable | None = None,
        num_kv_tokens: float = math.inf,
    ) -> None:
        """`num_kv_tokens`: the capacity of the KV caches of all engines together."""
        self._admission = Admission(settings, tenants=(ANONYMOUS,), clock=clock)
        self._admission.wait.num_kv_tokens = num_kv_tokens
        if table is not None:
            self._admission.wait.set_costs(table)
        self._clock = clock

    def enter(self, request: EngineCoreRequest) -> AdmittedPlace | str:
        deadlines = [each for each in (request.deadline, request.first_token_deadline) if each is not None]
        place = AdmittedPlace()
        try:
            place.ticket = place.scope.enter_context(
                self._admission.queue(
                    ANONYMOUS,
                    choices=request.sampling.n,
                    tokens=len(request.prompt_token_ids),
                    timeout=min(deadlines) - self._clock() if deadlines else None,
                    max_tokens=request.sampling.max_tokens,
                )
            )
        except ApiError as refusal:
            return f"HTTP {refusal.status} {refusal.code}"
        place.ticket.count_tokens(len(request.prompt_token_ids))
        return place


class AdmittedPlace:
    """A ticket of the queue that is held until its request ends, with `begin` for each choice."""

    ticket: QueueTicket

    def __init__(self) -> None:
        self.scope = ExitStack()

    def begin(self) -> None:
        """Note the first token of a choice."""
        self.ticket.begin()

    def leave(self, num_tokens: int) -> None:
        """Note that the request ended with `num_tokens` output tokens in all."""
        for _ in range(running := self.ticket.running):
            self.ticket.end(num_tokens // running)
        self.scope.close()


# ------------------------------------------------------------------------------------------------------------ recording
# A simulation as JSON lines of frames, which the dashboard plays.


class Recording:
    """Writes a frame of each engine at every call of `watch`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._latest: dict[int, int] = {}  # by engine: the last step that was written

    def watch(self, simulation: Simulation) -> None:
        """Write the steps since the previous call."""
        for replica in simulation.engines.replicas:
            snapshot = replica.core.snapshot()
            frame = make_frame(snapshot, engine=replica.index, after_step=self._latest.get(replica.index, 0))
            if snapshot.steps:
                self._latest[replica.index] = snapshot.steps[-1].step
            self._file.write(msgspec.json.encode(frame) + b"\n")
