"""A real server whose device fails when it is told to: `hypercorn tests.integration.chaos.faulty:main`.

Everything is what `app:main` serves, except that each step passes through a `FaultyExecutor`. Tests order faults by
`Faults`, which writes them into the file that the variable CHAOS_FAULTS names; the executor looks into it before each
step. `python -m tests.integration.chaos.faulty serve` is `headrace serve` with the same executor.

A fault strikes after the step has been computed, as one in the middle of a kernel does: the runner has seen the plan.
With CHAOS_DEVICE=simulated the executor behind the faults is the engine tests' own, which needs no torch to start and
no time to run: for tests of how a server ends, which each need one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import app.serving.loading
from app import main
from app.config.settings import Settings
from engine.costs.measuring import MADE_UP
from engine.executor import Executor
from engine.messages import ModelFacts
from engine.plan import ModelRunnerOutput, SchedulerOutput
from gpu.checkpoint import ModelFiles
from tests.engine.checked_executor import CheckedExecutor

DEVICE_VARIABLE = "CHAOS_DEVICE"
FAULTS_VARIABLE = "CHAOS_FAULTS"

__all__ = ["Fault", "Faults", "FaultyExecutor", "main"]  # `main` is for Hypercorn

Kind = Literal[
    "error",  # the step raises
    "memory",  # the step raises MemoryError
    "nan",  # the rows of the requests that match hold no finite number
    "slow",  # the step takes `seconds` longer
    "hang",  # the step does not end while this is ordered
    "panic",  # what no `except Exception` catches, like the panic of a native library
    "exit",  # SystemExit, which ends event loops that it reaches
]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Strikes steps with requests in them that fit all conditions, `times` times."""

    number: int
    kind: Kind
    request: str = ""  # one whose id contains this is in the step
    more_than: int = 0  # requests are in the step
    times: int | None = None  # None: always
    seconds: float = 0.0

    def rows(self, plan: SchedulerOutput) -> list[int]:
        """Where the requests that match are in the batch; nowhere if the fault does not strike this step."""
        if len(plan.request_ids) <= self.more_than:
            return []
        return [index for index, request_id in enumerate(plan.request_ids) if self.request in request_id]


class Faults:
    """The test's side: the faults that are in force."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._orders: dict[int, Fault] = {}
        self._ordered = 0
        self.clear()

    def order(self, kind: Kind, **conditions: Any) -> Fault:
        """In force from the next step on."""
        self._ordered += 1
        fault = self._orders[self._ordered] = Fault(number=self._ordered, kind=kind, **conditions)
        self._write()
        return fault

    def clear(self) -> None:
        """No more faults; what hangs goes on."""
        self._orders.clear()
        self._write()

    @contextmanager
    def during(self, kind: Kind, **conditions: Any) -> Iterator[None]:
        """A fault that is in force within the block."""
        fault = self.order(kind, **conditions)
        try:
            yield
        finally:
            del self._orders[fault.number]
            self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(list(self._orders.values())))
        new.replace(self.path)


class Panic(BaseException):
    """What a native library may raise."""


class FaultyExecutor:
    """An `engine.executor.Executor` around another one."""

    def __init__(self, inner: Any, path: Path, *, max_model_len: int, summary: str) -> None:
        self.max_model_len = max_model_len
        self.summary = self.machine = summary
        self.facts = ModelFacts(compute_form=summary)
        self._inner = inner
        self._path = path
        self._struck: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> Step:
        names = (*plan.request_ids, *plan.removed_request_ids)
        if names and all(name.startswith(MADE_UP) for name in names):
            # Such a step reads what nobody has written, which the checking executor does not allow anybody.
            made_up = ModelRunnerOutput(sampled_token_ids=[[0] for _ in plan.request_ids], logprobs={})
            return Step(lambda: made_up)
        handle = self._inner.submit(plan, abandoned)
        return Step(lambda: self._strike(plan, handle.result()))

    def _strike(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for fault in self._orders():
            rows = fault.rows(plan)
            if not rows or self._struck[fault.number] == fault.times:
                continue
            self._struck[fault.number] += 1
            match fault.kind:
                case "error":
                    raise RuntimeError("a fault was ordered")
                case "memory":
                    raise MemoryError("a fault was ordered")
                case "nan":
                    output.not_finite = sorted({*output.not_finite, *rows})
                case "slow":
                    time.sleep(fault.seconds)
                case "hang":
                    while fault in self._orders():
                        time.sleep(0.01)
                case "panic":
                    raise Panic("a fault was ordered")
                case "exit":
                    raise SystemExit("a fault was ordered")
        return output

    def _orders(self) -> list[Fault]:
        return msgspec.json.decode(self._path.read_bytes(), type=list[Fault])


class Step:
    """The handle of a step that may fail."""

    def __init__(self, run: Callable[[], ModelRunnerOutput]) -> None:
        self.result = run


_make_real_executor = app.serving.loading.make_executor


def _make_executor(settings: Settings, files: ModelFiles, kv_cache_share: float) -> Any:
    path = Path(os.environ[FAULTS_VARIABLE])
    if os.environ.get(DEVICE_VARIABLE) == "simulated":
        simulated = CheckedExecutor(8192, settings.block_size, files.config.vocab_size, step_seconds=0.001)
        return FaultyExecutor(simulated, path, max_model_len=settings.max_model_len or 1024, summary="simulated")
    real = _make_real_executor(settings, files, kv_cache_share)
    return FaultyExecutor(real, path, max_model_len=real.max_model_len, summary=real.summary)


if FAULTS_VARIABLE in os.environ:  # in a server, not in the tests' own process
    app.serving.loading.make_executor = _make_executor
    app.serving.loading.ENGINE_MODULE = "tests.integration.chaos.engine_process"

if TYPE_CHECKING:
    _: type[Executor] = FaultyExecutor

if __name__ == "__main__":
    from app.commands.cli import main as headrace

    sys.exit(headrace())
