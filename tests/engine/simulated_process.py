"""An engine over the simulated executor that can be described in plain data, and so be started in a process.

`python -m tests.engine.simulated_process` is that process. Its imports are few, so that it starts in a moment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.core.core import EngineCore, IsAbandoned
from engine.errors import ConfigError
from engine.messages import EngineCoreOutputs
from engine.plan import SchedulerOutput
from engine.transport.process_core import serve_parent
from engine.transport.wire import Report
from tests.engine.checked_executor import CheckedExecutor

COMMAND = [sys.executable, "-m", "tests.engine.simulated_process"]


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and what shall go wrong with it."""

    vocab_size: int
    max_model_len: int = 128
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    loading: str = ""  # how it fails: "config", "missing", "exit", "kill"
    last_step: int | None = None  # the step after it raises, in the engine and not in the executor
    panic: bool = False  # with what no `except Exception` catches
    poison: int | None = None  # the step in which a prompt with this token begins kills the process
    hang_while: str | None = None  # each step waits as long as there is a file of this name


class SimulatedCore(EngineCore):
    simulation: Simulation

    def step(self, is_abandoned: IsAbandoned = lambda request_ids: False) -> EngineCoreOutputs:
        while self.simulation.hang_while and Path(self.simulation.hang_while).exists():
            time.sleep(0.005)
        if self.num_steps == self.simulation.last_step:
            raise SystemExit("a panic") if self.simulation.panic else LookupError("a bug in the engine")
        return super().step(is_abandoned)


def build(simulation: Simulation, report: Report) -> SimulatedCore:
    report("Loading what is simulated", 0, 2)
    report("Loading what is simulated", 1, 2)
    time.sleep(simulation.load_seconds)
    match simulation.loading:
        case "config":
            raise ConfigError("max_model_len", 9, allowed="it must be 8", hint="max_model_len=8 works")
        case "missing":
            raise FileNotFoundError("no model there")
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def die_of_poison(plan: SchedulerOutput) -> None:
        if any(simulation.poison in request.token_ids for request in plan.new_requests):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    executor = CheckedExecutor(
        simulation.num_blocks,
        simulation.block_size,
        simulation.vocab_size,
        max_num_seqs=simulation.max_num_seqs,
        max_num_batched_tokens=simulation.max_num_batched_tokens,
        step_seconds=simulation.step_seconds,
        before_step=die_of_poison,
    )
    config = EngineConfig(
        max_model_len=simulation.max_model_len,
        max_num_seqs=simulation.max_num_seqs,
        max_num_batched_tokens=simulation.max_num_batched_tokens,
    )
    core = SimulatedCore(config, executor)
    core.simulation = simulation
    report("Loading what is simulated", 2, 2)
    return core


def build_from(setup: object, report: Report) -> SimulatedCore:
    return build(msgspec.convert(setup, Simulation), report)


if __name__ == "__main__":
    serve_parent(build_from)
