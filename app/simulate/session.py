"""A simulation whose parameters change while it runs, for a person who watches. Same parameters, changes and seed: same
frames, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from app.settings import Settings
from app.simulate.door import AdmissionDoor
from app.simulate.loads import LoadShape, OpenLoad
from engine.core.config import EngineConfig
from engine.core.core import EngineCore
from engine.simulation.clock import VirtualClock
from engine.simulation.counting import CountingExecutor
from engine.simulation.engines import Engines
from engine.simulation.simulation import SimulatedRequest, Simulation

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2**15
KEPT, KEPT_TOKENS = 10_000, 2**20  # ended requests and their output tokens, for percentiles


class Parameters(LoadShape):
    """What a person may set."""

    step_seconds: float = Field(default=0.015, ge=0.0001, le=10)
    max_num_seqs: int = Field(default=8, ge=1, le=256)
    max_num_batched_tokens: int = Field(default=512, ge=256, le=16384)
    admission: bool = False  # refuse as the server would; else the queue may grow for ever
    num_blocks: int = Field(default=4096, ge=64, le=2**17)  # of 16 tokens; lengths are cut so that one request fits
    seed: int = Field(default=0, ge=0, le=2**31)


_TOKENS_PER_BLOCK, _TOKENS_PER_REQUEST = 8, 32  # as much memory as one of each

FIXED = ("num_blocks", "seed", "admission")  # parameters that cannot change while it runs

_COMFORTABLE = Parameters(rate=3, max_num_seqs=8, step_seconds=0.015, output_len=40)
PRESETS = {
    "comfortable": _COMFORTABLE,
    "overloaded": _COMFORTABLE.model_copy(update={"rate": 8.0, "max_num_seqs": 4}),
    "one slot": _COMFORTABLE.model_copy(update={"rate": 2.0, "max_num_seqs": 1, "output_len": 24.0}),
}
"""Three lessons. Of 40 tokens at 15 ms, 8 slots serve 13 requests a second and 4 serve 6.7: the queue of 8 a second
grows without bound. One slot serves 2.8 of 24 tokens, so that 2 a second can be served; but now and then one waits for
a dozen others, and p99 is what hurts."""


class Session:
    """`advance` is bounded by its steps and its work; a step takes about 0.1 to 0.5 ms of the caller's thread."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._longest = min(MAX_MODEL_LEN, parameters.num_blocks * BLOCK_SIZE)
        self.load = OpenLoad(lambda: self.parameters, self._longest, parameters.seed)
        settings = Settings().model_copy(update={"max_num_seqs": parameters.max_num_seqs})
        door = (lambda clock: AdmissionDoor(settings, clock)) if parameters.admission else None
        self.simulation = Simulation(Engines(self._make_core), self.load, door, keep=KEPT, keep_tokens=KEPT_TOKENS)
        self._begin_account()

    def _make_core(self, clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        self._executor = CountingExecutor(
            self.parameters.num_blocks,
            BLOCK_SIZE,
            lambda load: self.parameters.step_seconds,
            clock=clock,
            sleep=clock.sleep,
        )
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
        """Go on with other parameters. Averages begin anew. Raises ValueError, of which pydantic's is one."""
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
        Raises ValueError if more requests have come than are kept in memory; the session cannot go on then."""
        self.simulation.advance(until, max_steps, max_work)

    @property
    def kept_tokens(self) -> int:
        """The memory of prompts, the times of tokens, blocks and requests, in tokens of about 50 bytes."""
        simulation = self.simulation
        num_requests = len(simulation.open) + len(simulation.ended)
        return (
            self.load.open_tokens
            + simulation.kept_tokens
            + _TOKENS_PER_BLOCK * self.parameters.num_blocks
            + _TOKENS_PER_REQUEST * num_requests
        )

    # --- figures

    def _begin_account(self) -> None:
        simulation = self.simulation
        self._began = simulation.now
        self._at_begin = (simulation.request_seconds, self._executor.row_seconds, simulation.num_ended)

    def kpis(self) -> Mapping[str, float]:
        """Since the beginning or the latest change. `little` is λW, which in the long run is `num_in_system`, L."""
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
