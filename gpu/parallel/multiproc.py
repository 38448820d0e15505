"""Ranks on this machine: one plan a step to all of them through shared memory, outputs from one.

Every rank is a process (`gpu.parallel.rank_process`) with its part of the model, and applies every plan to a row table
of its own. One that ends, or is stopped, ends all the others at once, and the executor with them: whoever made it makes
another. The kernel tells of it, and no time has to pass to find it out.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.core.executor import StepHandle
from engine.errors import EngineDead, HeadraceError, RankLost
from engine.scheduler.plan import ModelRunnerOutput, SchedulerOutput
from gpu.checkpoint import Progress as ReportProgress
from gpu.host import usable_cores
from gpu.model_loader import WorkerOptions, resolve_device
from gpu.parallel.messages import Answer, CacheSize, Call, Failed, Loaded, Masks, Output, Progress, Step, Up, encode
from gpu.parallel.rank_child import RankChild
from gpu.parallel.rank_process import RankSetup
from gpu.parallel.ring import RingWriter
from gpu.runner import FinishedStep

ABANDONED_SECONDS = 0.02  # between two looks at whether a step is still wanted
# A step that has failed on one rank fails on all, for the same reason; where another waits for that one instead, their
# states have parted. Far more than ranks that compute side by side are apart.
FAILURE_SECONDS = 0.5

OnLost = Callable[[HeadraceError], None]


class MultiprocExecutor:
    """An `engine.core.executor.Executor` that prepares. Made and used by one thread.

    Raises what a rank's loading raises, RankLost where one ends meanwhile.
    """

    def __init__(self, setup: RankSetup, progress: ReportProgress) -> None:
        """`setup` is that of rank 0."""
        world_size = setup.world_size
        self._host = socket.gethostname()
        self._lock = threading.Lock()
        self._error: RankLost | None = None
        self._is_closed = False
        self._on_lost: OnLost = lambda error: None
        self._ring = RingWriter(world_size)
        self._steps: deque[int] = deque()  # submitted and not waited for, oldest first
        self._ended: dict[int, tuple[RankChild, Output | Failed]] = {}
        self._failed: deque[int] = deque(maxlen=16)  # steps of late
        self._num_submitted = 0
        self._num_steps = 0  # that were waited for
        self._is_prepared = False
        self._ranks: list[RankChild] = []
        self._ranks_by_descriptor: dict[int, RankChild] = {}
        self._poll = select.poll()
        try:
            for index in range(world_size):
                own = _setup_of(setup, index)
                self._ranks.append(RankChild(index, self._ring, own, self._lose))
            for rank in self._ranks:
                self._ranks_by_descriptor[rank.connection.fileno()] = rank
                self._poll.register(rank.connection, select.POLLIN)
            loaded = self._load(progress)
        except BaseException:
            self.shutdown()
            raise
        self.num_blocks = loaded.num_blocks
        self.block_size = loaded.block_size
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.pipeline_depth = max(loaded.pipeline_depth, setup.pipeline_parallel_size)
        self.kv_windows = loaded.kv_windows
        self.prompt_form_differs = loaded.prompt_form_differs
        self.compute_form = loaded.compute_form
        layout = f"{world_size} rank{'s' if world_size > 1 else ''}"
        layout += f" (tensor parallel {setup.tensor_parallel_size}, pipeline parallel {setup.pipeline_parallel_size})"
        self.machine = f"{layout}: {loaded.computes}, {loaded.device_name}"
        self.summary = f"{layout}, each: {loaded.computes}. {loaded.kv_cache}"
        self._output_rank = world_size - setup.tensor_parallel_size  # the first of the last stage

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return [rank.pid for rank in self._ranks]

    def watch(self, on_lost: OnLost) -> None:
        """As `engine.core.executor.Watched` has it."""
        with self._lock:
            self._on_lost = on_lost
            error = self._error
        if error is not None:
            on_lost(error)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        if self._is_closed:
            return FinishedStep(EngineDead("the executor has been shut down"))
        self._num_submitted += 1
        self._ring.write(encode(Step(self._num_submitted, plan)), self._check)
        self._steps.append(self._num_submitted)
        return _RemoteStep(self, self._num_submitted, plan, abandoned)

    def prepare(self) -> bool:
        if not self._is_prepared:
            self._is_prepared = not any(self._call("prepare"))
        return not self._is_prepared

    def start_profile(self) -> None:
        self._call("start_profile")

    def stop_profile(self) -> list[dict[str, Any]]:
        return self._call("stop_profile")[self._output_rank] or []

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for rank in self._ranks:
                rank.kill()
            for rank in self._ranks:
                rank.join()
            self._ring.close()

    # --- steps

    def result(self, number: int, plan: SchedulerOutput, abandoned: Callable[[], bool] | None) -> ModelRunnerOutput:
        """Wait for the oldest step."""
        if plan.masks is not None:
            self._ring.write(encode(Masks.of(number, plan.masks)), self._check)
        timeout = None if abandoned is None else ABANDONED_SECONDS
        while number not in self._ended:
            self._receive(timeout)
            if abandoned is not None and abandoned():
                self._ring.abandoned = number
                abandoned = timeout = None
        self._steps.popleft()
        self._num_steps += 1
        rank, ended = self._ended.pop(number)
        if isinstance(ended, Output):
            return ended.output
        self._failed.append(number)
        self._wait_all_failed(rank, ended.error.kind)
        raise ended.error.error()

    def _wait_all_failed(self, rank: RankChild, kind: str) -> None:
        """Wait until a step that has failed on a rank is over on every one."""
        until = time.monotonic() + FAILURE_SECONDS
        while any(self._ring.steps(other.index) < self._num_steps for other in self._ranks):
            if time.monotonic() > until:
                self._lose(rank.index, f"has failed in a step that others had begun: {kind}")
            self._receive(0.001)

    def _receive(self, timeout: float | None) -> None:
        """Take what has come; wait for it, so long at most. Raises RankLost."""
        for rank, message in self._messages(timeout):
            match message:
                case Output(step) if step in self._steps:
                    self._ended.setdefault(step, (rank, message))
                case Failed(step) if step in self._steps:
                    self._ended[step] = rank, message
                case Failed(step, error) if step not in self._failed:
                    self._lose(rank.index, f"has failed in a step that others have made: {error.kind}")

    def _messages(self, timeout: float | None) -> list[tuple[RankChild, Up]]:
        came: list[tuple[RankChild, Up]] = []
        for descriptor, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            rank = self._ranks_by_descriptor[descriptor]
            try:
                came.append((rank, rank.receive()))
            except EOFError:
                rank.wait_told()
                self._check()
                raise
        return came

    def _call(self, name: str) -> list[Any]:
        """Have every rank do something, between steps, and return what each says."""
        if self._is_closed:
            return [None] * len(self._ranks)
        self._ring.write(encode(Call(name)), self._check)
        answers = self._from_each(Answer, lambda rank, message: None)
        for answer in answers:
            if answer.error is not None:
                raise answer.error.error()
        return [answer.value for answer in answers]

    # --- loading and losing

    def _load(self, progress: ReportProgress) -> Loaded:
        def report(rank: RankChild, message: Up) -> None:
            match message:
                case Progress(phase, done, total) if rank.index == 0:
                    progress(phase, done, total)
                case Failed(error=error):
                    raise error.error()

        sizes = self._from_each(CacheSize, report)
        num_blocks, max_model_len = min(each.num_blocks for each in sizes), min(each.max_model_len for each in sizes)
        self._ring.write(encode(CacheSize(num_blocks, max_model_len)), self._check)
        return self._from_each(Loaded, report)[-1]

    def _from_each(self, kind: type[Any], other: Callable[[RankChild, Up], None]) -> list[Any]:
        """A message of this kind from each rank, by rank."""
        found: dict[int, Any] = {}
        while len(found) < len(self._ranks):
            for rank, message in self._messages(None):
                if isinstance(message, kind):
                    found[rank.index] = message
                else:
                    other(rank, message)
        return [found[index] for index in sorted(found)]

    def _lose(self, index: int, why: str) -> None:
        """A rank is of no use any more, so none is. On any thread."""
        with self._lock:
            if self._error is not None or self._is_closed:
                return
            words = self._ring.last_words(index)
            self._error = error = RankLost(index, self._host, f"{why}: {words}" if words else why)
            for rank in self._ranks:
                rank.kill()
            on_lost = self._on_lost
        on_lost(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _RemoteStep:
    """A `StepHandle`."""

    def __init__(
        self,
        executor: MultiprocExecutor,
        number: int,
        plan: SchedulerOutput,
        abandoned: Callable[[], bool] | None,
    ) -> None:
        self._executor = executor
        self._number = number
        self._plan = plan
        self._abandoned = abandoned

    def result(self) -> ModelRunnerOutput:
        return self._executor.result(self._number, self._plan, self._abandoned)


def load_multiproc(
    files_of: dict[str, Any], options: WorkerOptions, sizes: dict[str, Any], progress: ReportProgress
) -> MultiprocExecutor:
    """Load a model on ranks. `files_of` are the arguments of `gpu.checkpoint.open_model`, `sizes` those of a layout."""
    return MultiprocExecutor(RankSetup(rank=0, **sizes, **files_of, options=asdict(options)), progress)


def _setup_of(setup: RankSetup, rank: int) -> RankSetup:
    """The same for another rank: what it gets of the machine."""
    import msgspec

    options, size = dict(setup.options), setup.world_size
    if resolve_device(options["device"]) == "cpu":
        options["num_threads"] = max(1, (options["num_threads"] or usable_cores()) // size)
        options["kv_cache_share"] /= size
    else:
        options["device"] = f"cuda:{rank}"
    return msgspec.structs.replace(setup, rank=rank, options=options)
