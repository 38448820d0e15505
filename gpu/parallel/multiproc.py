"""Ranks as processes of this machine.

Every rank is a process (`gpu.parallel.rank_main`) with its part of the model, and applies every plan to a row table
of its own. One that ends, or is stopped, ends all the others at once, and the executor with them; its engine is started
again. The kernel tells of an end: no timeout has to pass.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from engine.child import end_in_words, signal_name, start_process
from engine.errors import EngineDead, HeadraceError, RankLost
from engine.executor import StepHandle
from engine.plan import MasksHandle, ModelRunnerOutput, SchedulerOutput
from gpu.checkpoint import Progress as ReportProgress
from gpu.host import usable_cores
from gpu.model_loader import resolve_device
from gpu.parallel.links import RingWriter, link_bytes
from gpu.parallel.messages import (
    Answer,
    CacheSize,
    Call,
    Down,
    ExpertTokens,
    Failed,
    Group,
    Loaded,
    Masks,
    Output,
    Progress,
    RankSetup,
    Step,
    Up,
    decode_up,
    encode,
)
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout

ABANDONED_SECONDS = 0.02  # between two looks at whether a step is still wanted
# In which a step that has failed on one rank has to fail on all: else some are waiting for that one, and what ranks
# know of the batch differs. Time for which a busy machine gives a rank no core does not count.
FAILURE_SECONDS = 0.5

RANK_MODULE = "gpu.parallel.rank_main"

OnLost = Callable[[HeadraceError], None]


class Wire(Protocol):
    """Broadcasts to all ranks: a `RingWriter`, where they are on this machine."""

    abandoned: int

    def write(self, message: bytes, check: Callable[[], None]) -> None: ...

    def steps(self, reader: int) -> int: ...

    def last_words(self, reader: int) -> str: ...

    def close(self) -> None: ...


class RankProcess(Protocol):
    """The handle of a rank's process: a `RankChild`, where it is on this machine."""

    index: int

    @property
    def pid(self) -> int: ...

    @property
    def seconds_without_a_core(self) -> float: ...

    def kill(self) -> None: ...

    def wait_told(self) -> None: ...

    def join(self) -> None: ...


class MultiprocExecutor:
    """An `engine.executor.Executor` that prepares. Made and used by one thread.

    Raises what a rank's loading raises, RankLost where one ends meanwhile.
    """

    def __init__(
        self,
        model: dict[str, Any],
        options: WorkerOptions,
        layout: Layout,
        progress: ReportProgress,
        *,
        hidden_size: int,
        module: str = RANK_MODULE,
        log: dict[str, Any] | None = None,
    ) -> None:
        """`model` are the arguments of `gpu.checkpoint.open_model`, `layout` is rank 0's; `hidden_size` is the
        model's, or more. `module` calls the main of a rank, `log` says how it is to configure its log."""
        world_size = layout.world_size
        self._layout = layout
        self._module, self._log = module, log or {}
        # As many steps are in flight as there are stages.
        self._link_bytes = link_bytes(layout.pipeline_parallel_size, options.max_num_batched_tokens, hidden_size)
        self._lock = threading.Lock()
        self._error: RankLost | None = None
        self._is_closed = False
        self._on_lost: OnLost = lambda error: None
        self._ring = self._make_ring(world_size)
        self._steps: deque[int] = deque()  # submitted and not waited for, oldest first
        self._masks: dict[int, MasksHandle] = {}  # of steps, that the ranks have not been told
        self._ended: dict[int, tuple[RankProcess, Output | Failed]] = {}
        self._failed: deque[int] = deque(maxlen=16)  # steps of late
        self._sampled: dict[int, list[list[int]] | None] = {}  # what earlier stages have not been told
        self._experts_told: dict[int, list[list[int]]] = {}  # lately, by the first rank of the stage
        self._tokens_of_experts: list[list[int]] = []
        self._num_submitted = 0
        self._num_steps = 0  # that were waited for
        self._is_prepared = False
        self._ranks: list[RankProcess] = []
        self._ranks_by_descriptor: dict[int, RankChild] = {}
        self._poll = select.poll()
        try:
            self._start_ranks(model, options)
            loaded = self._load(progress)
        except BaseException:
            self.shutdown()
            raise
        self.num_blocks = loaded.num_blocks
        self.block_size = loaded.block_size
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.pipeline_depth = max(loaded.pipeline_depth, layout.pipeline_parallel_size)
        self.facts = loaded.facts
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''} (tensor parallel {layout.tensor_parallel_size}, "
        ranks += f"pipeline parallel {layout.pipeline_parallel_size})"
        self.machine = f"{ranks}: {loaded.computes}, {loaded.device_name}"
        self.summary = f"{ranks}, each: {loaded.computes}. {loaded.kv_cache}"
        self._output_rank = world_size - layout.tensor_parallel_size  # the first of the last stage

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return [rank.pid for rank in self._ranks]

    def watch(self, on_lost: OnLost) -> None:
        """As `engine.executor.Watched` has it."""
        with self._lock:
            self._on_lost = on_lost
            error = self._error
        if error is not None:
            on_lost(error)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        if self._is_closed:
            raise EngineDead("the executor has been shut down")
        self._num_submitted += 1
        sampled, self._sampled = self._sampled, {}
        self._write(Step(self._num_submitted, plan, sampled))
        self._steps.append(self._num_submitted)
        if plan.masks is not None:
            self._masks[self._num_submitted] = plan.masks
        return _RemoteStep(self, self._num_submitted, abandoned)

    def prepare(self) -> bool:
        if not self._is_prepared:
            self._is_prepared = not any(self._call("prepare"))
        return not self._is_prepared

    def tokens_of_experts(self) -> list[list[int]]:
        return self._tokens_of_experts

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

    def result(self, number: int, abandoned: Callable[[], bool] | None) -> ModelRunnerOutput:
        """Wait for the oldest step."""
        self._write_masks(number)
        timeout = None if abandoned is None else ABANDONED_SECONDS
        while number not in self._ended:
            self._receive(timeout)
            if abandoned is not None and abandoned():
                self._ring.abandoned = number
                abandoned = timeout = None
        self._steps.popleft()
        self._num_steps += 1
        rank, ended = self._ended.pop(number)
        if self._layout.pipeline_parallel_size > 1:
            self._sampled[number] = ended.output.sampled_token_ids if isinstance(ended, Output) else None
        if isinstance(ended, Output):
            return ended.output
        self._failed.append(number)
        self._wait_all_failed(rank, ended.error.kind)
        raise ended.error.error()

    def _wait_all_failed(self, rank: RankProcess, kind: str) -> None:
        """Wait until a step that has failed on a rank is over on every one."""
        began = {other.index: time.monotonic() - other.seconds_without_a_core for other in self._ranks}
        while behind := [other for other in self._ranks if self._ring.steps(other.index) < self._num_steps]:
            now = time.monotonic()
            if any(now - other.seconds_without_a_core - began[other.index] > FAILURE_SECONDS for other in behind):
                self._lose(rank.index, f"has failed in a step that others had begun: {kind}")
            self._receive(0.001)

    def _write(self, message: Down) -> None:
        """Give it to all ranks. Takes what they say while there is no room: they may read no more before."""
        self._ring.write(encode(message), lambda: self._receive(0.0))

    def _write_masks(self, number: int) -> None:
        if (masks := self._masks.pop(number, None)) is not None:
            self._write(Masks.of(number, masks))

    def _receive(self, timeout: float | None) -> None:
        """Take what has come; wait for it, so long at most. Raises RankLost."""
        self._check()
        for rank, message in self._messages(timeout):
            self._take(rank, message)

    def _take(self, rank: RankProcess, message: Up) -> None:
        match message:
            case Output(step) if step in self._steps:
                self._ended.setdefault(step, (rank, message))
            case ExpertTokens(tokens):
                self._experts_told[rank.index] = tokens
                if len(self._experts_told) == self._layout.pipeline_parallel_size:
                    told, self._experts_told = sorted(self._experts_told.items()), {}
                    self._tokens_of_experts = [layer for _, layers in told for layer in layers]
            case Failed(step) if step in self._steps:
                earlier = self._ended.get(step)
                if earlier is None or isinstance(earlier[1], Output) or rank.index < earlier[0].index:
                    self._ended[step] = rank, message
            case Failed(step, error) if step not in self._failed:
                self._lose(rank.index, f"has failed in a step that others have made: {error.kind}")

    def _messages(self, timeout: float | None) -> list[tuple[RankProcess, Up]]:
        came: list[tuple[RankProcess, Up]] = []
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
        for number in [*self._masks]:  # which ranks wait for before they look what else there is
            self._write_masks(number)
        self._write(Call(name))
        answers = self._from_each(Answer, self._take)
        for answer in answers:
            if answer.error is not None:
                raise answer.error.error()
        return [answer.value for answer in answers]

    # --- loading and losing

    def _load(self, progress: ReportProgress) -> Loaded:
        def report(rank: RankProcess, message: Up) -> None:
            match message:
                case Progress(phase, done, total) if rank.index == 0:
                    progress(phase, done, total)
                case Failed(error=error):
                    raise error.error()

        sizes = self._from_each(CacheSize, report)
        num_blocks, max_model_len = min(each.num_blocks for each in sizes), min(each.max_model_len for each in sizes)
        self._write(CacheSize(num_blocks, max_model_len, sum(each.bytes_per_block for each in sizes)))
        return self._from_each(Loaded, report)[-1]

    # What a subclass does otherwise whose ranks are on other machines.

    def _make_ring(self, world_size: int) -> Wire:
        return RingWriter(world_size)

    def _start_ranks(self, model: dict[str, Any], options: WorkerOptions) -> None:
        assert isinstance(self._ring, RingWriter)
        with Shared(self._layout, self._link_bytes) as shared:
            for index in range(self._layout.world_size):
                setup = _setup(model, options, replace(self._layout, rank=index), shared, self._ring)
                setup.log = self._log
                rank = RankChild(index, self._module, setup, self._lose)
                self._ranks.append(rank)
                self._ranks_by_descriptor[rank.connection.fileno()] = rank
                self._poll.register(rank.connection, select.POLLIN)

    def _host_of(self, index: int) -> str:
        return socket.gethostname()

    def _from_each(self, kind: type[Any], other: Callable[[RankProcess, Up], None]) -> list[Any]:
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
            self._error = error = RankLost(index, self._host_of(index), f"{why}: {words}" if words else why)
            for rank in self._ranks:
                rank.kill()
            on_lost = self._on_lost
        on_lost(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _RemoteStep:
    """A `StepHandle`."""

    executor: MultiprocExecutor
    number: int
    abandoned: Callable[[], bool] | None

    def result(self) -> ModelRunnerOutput:
        return self.executor.result(self.number, self.abandoned)


class Shared:
    """What ranks share besides the driver's ring: descriptors, which are theirs when they have been started."""

    def __init__(self, layout: Layout, link_bytes: int) -> None:
        size, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
        self.links = [RingWriter(size, link_bytes) for _ in range(stages - 1)]
        self.segments = [os.memfd_create("headrace-ranks") for _ in range(stages)] if size > 1 else []
        self.store = os.memfd_create("headrace-store") if size > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for link in self.links:
            link.close()
        for descriptor in (*self.segments, *([] if self.store is None else [self.store])):
            os.close(descriptor)


def _setup(
    model: dict[str, Any], options: WorkerOptions, layout: Layout, shared: Shared, ring: RingWriter
) -> RankSetup:
    """What a rank is told, and what it gets of the machine."""
    size, stage = layout.world_size, layout.pp_rank
    own: dict[str, Any] = {"kv_cache_memory": options.kv_cache_memory and options.kv_cache_memory // size}
    if resolve_device(options.device) == "cpu":
        own["num_threads"] = max(1, (options.num_threads or usable_cores()) // size)
        own["kv_cache_share"] = options.kv_cache_share / size
    elif size > 1:
        own["device"] = f"cuda:{layout.rank}"
    writes = layout.tp_rank == 0 and not layout.is_last_stage
    return RankSetup(
        layout=layout,
        **model,
        options=asdict(replace(options, **own)),
        ring=Group(*ring.all_descriptors),
        before=None if layout.is_first_stage else Group(*shared.links[stage - 1].all_descriptors),
        after=Group(*shared.links[stage].all_descriptors) if writes else None,
        segment=shared.segments[stage] if shared.segments else None,
        store=shared.store,
    )


# ----------------------------------------------------------------------------------------------------------- rank child
# The driver's handle of one rank's process: starts it, receives from it, and tells why it ended.
#
# A thread waits for its end, and for a signal that stops it, which is as good as an end: the kernel tells both at once.


LONGEST_MESSAGE = 2**30  # bytes


class RankChild:
    """A process of one rank, whose main is `module`. `on_end(index, why)` is called once, on a thread of its own."""

    def __init__(self, index: int, module: str, setup: RankSetup, on_end: Callable[[int, str], None]) -> None:
        self.index = index
        self._on_end = on_end
        ours, theirs = socket.socketpair()
        started: Future[subprocess.Popen[bytes]] = Future()
        with theirs:
            passed = (theirs.fileno(), *setup.descriptors)
            self._watcher = threading.Thread(
                target=self._live, args=(module, passed, started), name=f"rank-{index}", daemon=True
            )
            self._watcher.start()
            self._process = started.result()
        self.connection = Connection(ours.detach())
        self.connection.send_bytes(msgspec.msgpack.encode(setup, enc_hook=int))  # sizes are ints of a kind of their own

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds_without_a_core(self) -> float:
        """As the function, of this process."""
        return seconds_without_a_core(self.pid)

    def receive(self) -> Up:
        """The next thing that it says. Waits for it; raises EOFError when it has ended."""
        try:
            return decode_up(self.connection.recv_bytes(LONGEST_MESSAGE))
        except OSError as error:  # the connection is reset, or a message cut off
            raise EOFError from error

    def kill(self) -> None:
        """At once, whatever it does. Nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)  # not `Popen.kill`, which would reap it

    def wait_told(self) -> None:
        """Wait until `on_end` has been called, of a process that has ended."""
        self._watcher.join()

    def join(self) -> None:
        """Wait for its end, and let go of it. Once."""
        self._watcher.join()
        self._process.wait()
        self.connection.close()

    def _live(self, module: str, passed: Sequence[int], started: Future[subprocess.Popen[bytes]]) -> None:
        # It is started here, because the kernel ends it with the thread that has started it.
        try:
            process = start_process(
                [sys.executable, "-m", module, str(passed[0]), f"rank={self.index}"],  # the last for ps
                {**os.environ, "HF_HUB_OFFLINE": "1"},  # what it needs is in the cache by now
                pass_fds=passed,
                death_signal=signal.SIGKILL,
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        # Left to be waited for, so that its number is not another's before all who know it are done with it.
        what = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert what is not None
        if what.si_code == os.CLD_STOPPED:
            self._on_end(self.index, f"was stopped by {signal_name(what.si_status)}")
        else:
            has_exited = what.si_code == os.CLD_EXITED
            self._on_end(self.index, end_in_words(what.si_status if has_exited else -what.si_status))


def seconds_without_a_core(pid: int) -> float:
    """For how long a process' threads, all in all, could have run and were not let; 0 where the kernel does not say.

    Of all threads: while one waits for a core, the main thread may be waiting for it.
    """
    nanoseconds = 0
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this one has
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9
