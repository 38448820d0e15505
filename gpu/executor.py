"""Executors: how a plan gets to the device. The application makes one here and hands it to the engine.

`UniProcExecutor` runs one worker in the engine's own thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import EngineDead
from engine.plan import ModelRunnerOutput, SchedulerOutput
from gpu.host import usable_cores
from gpu.weights import ModelFiles
from gpu.worker import Worker, WorkerOptions


def load_executor(
    files: ModelFiles, options: WorkerOptions | None = None, *, num_threads: int | None = None
) -> UniProcExecutor:
    """Load a model; call it in the thread that will run the steps, because torch's thread count belongs to a thread.

    How far it is can be told from `files.progress`. `num_threads` is how many threads compute on a CPU; None is one
    for each core that this process may use. Raises ConfigError for options that cannot work, ModelError for files.
    """
    torch.set_num_threads(num_threads or usable_cores())
    return UniProcExecutor(Worker(files.config, files.weights(), options or WorkerOptions()), files.config.vocab_size)


class UniProcExecutor:
    """An `engine.executor.Executor` whose steps have run when `submit` returns."""

    def __init__(self, worker: Worker, vocab_size: int) -> None:
        self.num_blocks = worker.kv_cache_size.num_blocks
        self.block_size = worker.kv_cache_size.block_size
        self.vocab_size = vocab_size
        self.max_model_len = worker.kv_cache_size.max_model_len  # what fits, for the engine's configuration
        dtype = str(worker.dtype).removeprefix("torch.")
        self.summary = f"{worker.device}, {dtype}, {torch.get_num_threads()} threads. {worker.kv_cache_size}"
        self._worker: Worker | None = worker

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> FinishedStep:
        if self._worker is None:
            return FinishedStep(EngineDead("the executor has been shut down"))
        try:
            return FinishedStep(self._worker.execute(plan, abandoned))
        except Exception as error:
            return FinishedStep(error)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


class FinishedStep:
    """The handle of a step that is over, well or badly."""

    def __init__(self, outcome: ModelRunnerOutput | Exception) -> None:
        self._outcome = outcome

    def result(self) -> ModelRunnerOutput:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome
