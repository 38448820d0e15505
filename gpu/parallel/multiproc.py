"""Ranks as processes of this machine.

Every rank is a process (`gpu.parallel.rank_main`) with its part of the model and its own row table, to which it applies
every plan. If one ends or is stopped, all ranks and the executor end at once, and the engine is started again. The
kernel reports an end, so no timeout has to pass.
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
from gpu.checkpoint import Progress
from gpu.host import usable_cores
from gpu.model_loader import resolve_device
from gpu.parallel import messages
from gpu.parallel.links import LONGEST_MESSAGE, RingWriter, link_bytes
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout

ABANDONED_SECONDS = 0.02  # between two checks whether a step was aborted
# A step that failed on one rank must end on all within this time; otherwise some wait for that rank, and the row tables
# differ. Time in which a busy machine gives a rank no core does not count.
FAILURE_SECONDS = 0.5

RANK_MODULE = "gpu.parallel.rank_main"

OnLost = Callable[[HeadraceError], None]


class Wire(Protocol):
    """Sends messages to all ranks: a `RingWriter` if the ranks are on this machine."""

    abandoned: int

    def write(self, message: bytes, check: Callable[[], None]) -> None: ...
    def steps(self, reader: int) -> int: ...
    def end_reason(self, reader: int) -> str: ...
    def close(self) -> None: ...


class RankProcess(Protocol):
    """The handle of a rank's process: a `RankChild` if it is on this machine."""

    index: int

    @property
    def pid(self) -> int: ...
    @property
    def seconds_without_a_core(self) -> float: ...
    def kill(self) -> None: ...
    def wait_reported(self) -> None: ...
    def join(self) -> None: ...


class MultiprocExecutor:
    """An `engine.executor.Executor` of several ranks. One thread makes and uses it.

    Raises the error of a rank's loading, and RankLost if a rank ends while it loads.
    """

    def __init__(
        self,
        model: dict[str, Any],
        options: WorkerOptions,
        layout: Layout,
        progress: Progress,
        *,
        hidden_size: int,
        module: str = RANK_MODULE,
        log: dict[str, Any] | None = None,
    ) -> None:
        """`model` are the arguments of `gpu.checkpoint.open_model`, `layout` is rank 0's, `hidden_size` is at least the
        model's. `module` is the main module of a rank; `log` configures its log."""
        world_size = layout.world_size
        self._layout = layout
        self._module, self._log = module, log or {}
        # As many steps as stages are in flight.
        self._link_bytes = link_bytes(layout.pipeline_parallel_size, options.max_num_batched_tokens, hidden_size)
        self._lock = threading.Lock()
        self._error: RankLost | None = None
        self._is_closed = False
        self._on_lost: OnLost = lambda error: None
        self._ring = self._make_ring(world_size)
        self._steps: deque[int] = deque()  # submitted and not waited for, oldest first
        self._masks: dict[int, MasksHandle] = {}  # by step, not yet sent to the ranks
        self._ended: dict[int, tuple[RankProcess, messages.Output | messages.Failed]] = {}
        self._failed: deque[int] = deque(maxlen=16)  # the latest failed steps
        self._sampled: dict[int, list[list[int]] | None] = {}  # tokens not yet sent to earlier stages
        self._new_experts: dict[int, list[list[int]]] = {}  # the latest counts, by the first rank of the stage
        self._tokens_of_experts: list[list[int]] = []
        self._num_submitted = 0
        self._num_steps = 0  # steps that were waited for
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
        return [rank.pid for rank in self._ranks]

    def watch(self, on_lost: OnLost) -> None:
        """Report the loss of a rank, as `engine.executor.Watched` describes."""
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
        self._write(messages.Step(self._num_submitted, plan, sampled))
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
        """Wait for the oldest step, and return its output or raise its error."""
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
            self._sampled[number] = ended.output.sampled_token_ids if isinstance(ended, messages.Output) else None
        if isinstance(ended, messages.Output):
            return ended.output
        self._failed.append(number)
        self._wait_all_failed(rank, ended.error.kind)
        raise ended.error.error()

    def _wait_all_failed(self, rank: RankProcess, kind: str) -> None:
        """Wait until a step that failed on one rank has ended on all ranks."""
        began = {other.index: time.monotonic() - other.seconds_without_a_core for other in self._ranks}
        while behind := [other for other in self._ranks if self._ring.steps(other.index) < self._num_steps]:
            now = time.monotonic()
            if any(now - other.seconds_without_a_core - began[other.index] > FAILURE_SECONDS for other in behind):
                self._lose(rank.index, f"has failed in a step that other ranks had begun: {kind}")
            self._receive(0.001)

    def _write(self, message: messages.Down) -> None:
        """Send a message to all ranks. While there is no room, receive their messages, so that they go on reading."""
        self._ring.write(messages.encode(message), lambda: self._receive(0.0))

    def _write_masks(self, number: int) -> None:
        if (masks := self._masks.pop(number, None)) is not None:
            self._write(messages.Masks.of(number, masks))

    def _receive(self, timeout: float | None) -> None:
        """Process the ranks' messages; wait up to `timeout` seconds for the first. Raises RankLost."""
        self._check()
        for rank, message in self._messages(timeout):
            self._take(rank, message)

    def _take(self, rank: RankProcess, message: messages.Up) -> None:
        match message:
            case messages.Output(step) if step in self._steps:
                self._ended.setdefault(step, (rank, message))
            case messages.ExpertTokens(tokens):
                self._new_experts[rank.index] = tokens
                if len(self._new_experts) == self._layout.pipeline_parallel_size:
                    stages, self._new_experts = sorted(self._new_experts.items()), {}
                    self._tokens_of_experts = [layer for _, layers in stages for layer in layers]
            case messages.Failed(step) if step in self._steps:
                earlier = self._ended.get(step)
                if earlier is None or isinstance(earlier[1], messages.Output) or rank.index < earlier[0].index:
                    self._ended[step] = rank, message
            case messages.Failed(step, error) if step not in self._failed:
                self._lose(rank.index, f"has failed in a step that other ranks have finished: {error.kind}")

    def _messages(self, timeout: float | None) -> list[tuple[RankProcess, messages.Up]]:
        came: list[tuple[RankProcess, messages.Up]] = []
        for descriptor, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            rank = self._ranks_by_descriptor[descriptor]
            try:
                came.append((rank, rank.receive()))
            except EOFError:
                rank.wait_reported()
                self._check()
                raise
        return came

    def _call(self, name: str) -> list[Any]:
        """Call a function on every rank, between steps, and return the results by rank."""
        if self._is_closed:
            return [None] * len(self._ranks)
        for number in [*self._masks]:  # ranks read no other message before they have these
            self._write_masks(number)
        self._write(messages.Call(name))
        answers = self._from_each(messages.Answer, self._take)
        for answer in answers:
            if answer.error is not None:
                raise answer.error.error()
        return [answer.value for answer in answers]

    # --- loading and losing

    def _load(self, progress: Progress) -> messages.Loaded:
        def report(rank: RankProcess, message: messages.Up) -> None:
            match message:
                case messages.LoadProgress(phase, done, total) if rank.index == 0:
                    progress(phase, done, total)
                case messages.Failed(error=error):
                    raise error.error()

        sizes = self._from_each(messages.CacheSize, report)
        agreed = messages.CacheSize(
            num_blocks=min(each.num_blocks for each in sizes),
            max_model_len=min(each.max_model_len for each in sizes),
            bytes_per_block=sum(each.bytes_per_block for each in sizes),
            num_checkpoints=min(each.num_checkpoints for each in sizes),
            state_bytes=sum(each.state_bytes for each in sizes),
        )
        self._write(agreed)
        return self._from_each(messages.Loaded, report)[-1]

    # A subclass with ranks on other machines overrides the next three.

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

    def _from_each(self, kind: type[Any], other: Callable[[RankProcess, messages.Up], None]) -> list[Any]:
        """Wait for a message of this kind from each rank, and return them by rank. `other` takes other messages."""
        found: dict[int, Any] = {}
        while len(found) < len(self._ranks):
            for rank, message in self._messages(None):
                if isinstance(message, kind):
                    found[rank.index] = message
                else:
                    other(rank, message)
        return [found[index] for index in sorted(found)]

    def _lose(self, index: int, why: str) -> None:
        """End all ranks because rank `index` has ended or failed. Called by any thread."""
        with self._lock:
            if self._error is not None or self._is_closed:
                return
            reason = self._ring.end_reason(index)
            self._error = error = RankLost(index, self._host_of(index), f"{why}: {reason}" if reason else why)
            for rank in self._ranks:
                rank.kill()
            on_lost = self._on_lost
        on_lost(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _RemoteStep:
    """The `StepHandle` of a step on ranks."""

    executor: MultiprocExecutor
    number: int
    abandoned: Callable[[], bool] | None

    def result(self) -> ModelRunnerOutput:
        return self.executor.result(self.number, self.abandoned)


class Shared:
    """The descriptors that ranks share besides the driver's ring. The driver closes them when the ranks have
    started."""

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
) -> messages.RankSetup:
    """Return the first message to a rank, with its share of the machine's cores and memory."""
    size, stage = layout.world_size, layout.pp_rank
    own: dict[str, Any] = {"kv_cache_memory": options.kv_cache_memory and options.kv_cache_memory // size}
    own["num_threads"] = max(1, (options.num_threads or usable_cores()) // size)
    if resolve_device(options.device) == "cpu":
        own["kv_cache_share"] = options.kv_cache_share / size
    elif size > 1:
        own["device"] = f"cuda:{layout.rank}"
    writes = layout.tp_rank == 0 and not layout.is_last_stage
    return messages.RankSetup(
        layout=layout,
        **model,
        options=asdict(replace(options, **own)),
        ring=_group(ring),
        before=None if layout.is_first_stage else _group(shared.links[stage - 1]),
        after=_group(shared.links[stage]) if writes else None,
        segment=shared.segments[stage] if shared.segments else None,
        store=shared.store,
    )


def _group(ring: RingWriter) -> messages.Group:
    return messages.Group(ring.memory, ring.wakers)


# ----------------------------------------------------------------------------------------------------------- rank child


class RankChild:
    """The driver's handle of one rank's process, which runs `module`.

    A thread waits until the process ends or a signal stops it, which counts as an end, then calls `on_end(index, why)`.
    """

    def __init__(self, index: int, module: str, setup: messages.RankSetup, on_end: Callable[[int, str], None]) -> None:
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
        self.connection.send_bytes(msgspec.msgpack.encode(setup, enc_hook=int))  # sizes are of a subclass of int

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds_without_a_core(self) -> float:
        return seconds_without_a_core(self.pid)

    def receive(self) -> messages.Up:
        """Wait for the rank's next message. Raises EOFError when the process has ended."""
        try:
            return messages.decode_up(self.connection.recv_bytes(LONGEST_MESSAGE))
        except OSError as error:  # the connection was reset, or a message was cut off
            raise EOFError from error

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)  # not `Popen.kill`, which would reap it

    def wait_reported(self) -> None:
        """Wait until `on_end` has returned. Called when the process has ended."""
        self._watcher.join()

    def join(self) -> None:
        """Wait for the end of the process, and free its resources. Called once."""
        self._watcher.join()
        self._process.wait()
        self.connection.close()

    def _live(self, module: str, passed: Sequence[int], started: Future[subprocess.Popen[bytes]]) -> None:
        # This thread starts the process, because the kernel kills it when the thread that started it ends.
        try:
            process = start_process(
                [sys.executable, "-m", module, str(passed[0]), f"rank={self.index}"],  # the last is for ps
                {**os.environ, "HF_HUB_OFFLINE": "1"},  # the driver has fetched the files
                pass_fds=passed,
                death_signal=signal.SIGKILL,
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        # WNOWAIT: the process stays a zombie until `join`, so that `kill` cannot hit another process of its id.
        what = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert what is not None
        if what.si_code == os.CLD_STOPPED:
            self._on_end(self.index, f"was stopped by {signal_name(what.si_status)}")
        else:
            has_exited = what.si_code == os.CLD_EXITED
            self._on_end(self.index, end_in_words(what.si_status if has_exited else -what.si_status))


def seconds_without_a_core(pid: int) -> float:
    """Return the time for which threads of a process were ready to run but had no core; 0 if the kernel does not count
    it.

    The times of all threads are added: while one waits for a core, the main thread may be waiting for it.
    """
    nanoseconds = 0
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this thread has ended
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9
