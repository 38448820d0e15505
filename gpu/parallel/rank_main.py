"""The main module of a rank's process: `python -m gpu.parallel.rank_main`, started by `gpu.parallel.multiproc`.

The process ignores signals to its group. The kernel kills it when its parent ends, even if it is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from engine.child_main import ignore_signals
from engine.errors import ErrorInWords, HeadraceError
from engine.executor import STEPS_BETWEEN_EXPERT_LOADS, StepHandle
from engine.plan import TokenMasks
from gpu.checkpoint import ModelFiles, open_model
from gpu.cpu.library import load_library
from gpu.executor import device_name, load_worker
from gpu.kv_cache import KVCacheSize
from gpu.model_loader import library_for, resolve_device, use_device
from gpu.parallel import messages
from gpu.parallel.links import RingReader, RingWriter, StageLink
from gpu.runner.host_runner import ModelRunner
from gpu.runner.runner import NO_LINKS, FinishedStep, WorkerOptions
from gpu.sharding import Layout
from gpu.worker import Worker

if TYPE_CHECKING:
    from gpu.profile import HostProfile, TorchProfile

logger = logging.getLogger(__name__)

AbortChecks = Callable[[int], Callable[[], bool] | None]
"""Makes the abort check of a step, given its number; None if another rank checks."""

Send = Callable[[messages.Up], None]
"""Sends a message to the driver."""


def main(configure: Callable[[messages.RankSetup], None] = lambda setup: None) -> NoReturn:
    """Run a rank until its process ends. `configure` is called first, with the driver's first message."""
    ignore_signals(signal.SIGTSTP)
    up = Connection(int(sys.argv[1]))
    setup = msgspec.msgpack.decode(up.recv_bytes(), type=messages.RankSetup)
    configure(setup)
    threading.Thread(target=_end_with_parent, args=(up,), name="lifeline", daemon=True).start()
    reader = _reader(setup.ring, setup.layout.rank)
    try:
        layout, link = setup.layout, None
        if layout.pipeline_parallel_size > 1:
            before = None if setup.before is None else _reader(setup.before, layout.tp_rank)
            after = None if setup.after is None else RingWriter.inherited(setup.after.memory, setup.after.wakers)
            link = StageLink(before, after, is_last=layout.is_last_stage)
        checks = partial(_abort_checks, layout, reader)
        serve(
            setup, reader, link, lambda message: up.send_bytes(messages.encode(message)), join_on_this_machine, checks
        )
    except BaseException as error:
        reader.leave_end_reason(public_text(error))
        if not isinstance(error, HeadraceError):  # the driver logs the text of a HeadraceError
            logger.critical("this rank ends", exc_info=True)
            logging.shutdown()
    os._exit(1)  # without waiting for a library's threads and exit handlers


Join = Callable[[messages.RankSetup, WorkerOptions, ModelFiles], Any]
"""Makes the communicator of a rank."""


def serve(
    setup: messages.RankSetup,
    inbox: Inbox,
    link: StageLink | None,
    send: Send,
    join: Join,
    abort_checks: Callable[[Worker], AbortChecks],
) -> None:
    """Load a rank, then execute its driver's messages until the process ends. `join` makes the communicator."""
    rank = Rank(setup.layout, inbox, send, link)
    try:
        worker, cost, vocab_size = _load(setup, rank, send, join)
    except HeadraceError as error:
        send(messages.Failed(-1, ErrorInWords.of(error)))
        raise
    rank.serve(worker, cost, vocab_size, abort_checks(worker))


def _load(setup: messages.RankSetup, rank: Rank, send: Send, join: Join) -> tuple[Worker, str, int]:
    """Return the worker, the sentence for the log about its quantization error, and the vocabulary's size."""
    files = open_model(
        setup.model,
        cache_dir=None if setup.cache_dir is None else Path(setup.cache_dir),
        load_format=setup.load_format,
        seed=setup.seed,
        progress=lambda phase, done, total: send(messages.LoadProgress(phase, done, total)),
    )
    options = replace(WorkerOptions(), **setup.options)
    use_device(options.device)  # before the ranks connect, because that may use the devices
    worker, cost = load_worker(
        files,
        options,
        setup.layout,
        communicator=join(setup, options, files),
        links=NO_LINKS if rank.link is None else rank.link.links,
        agree=rank.agree,
    )
    return worker, cost, files.config.vocab_size


def join_on_this_machine(setup: messages.RankSetup, options: WorkerOptions, files: ModelFiles) -> Any:
    """Return the communicator of the tensor ranks of a stage, None for one rank. On a CPU they share memory."""
    layout, device = setup.layout, resolve_device(options.device)
    if layout.tensor_parallel_size == 1:
        return None
    if device == "cpu" and (library := load_library()) is not None:
        from gpu.cpu.communicator import SharedMemoryCommunicator

        assert setup.segment is not None
        own, size, first = layout.tp_rank, layout.tensor_parallel_size, layout.rank - layout.tp_rank
        ranks = SharedMemoryCommunicator(library, setup.segment, own, size, first=first)
        if library_for(files.config, options, device) is not None:
            return ranks
        from gpu.models.communicators import SharedTensors

        return SharedTensors(ranks)
    import torch.distributed as dist

    from gpu.models.communicators import TorchCommunicator

    store = dist.FileStore(f"/proc/self/fd/{setup.store}", layout.world_size)  # type: ignore[attr-defined]
    return TorchCommunicator(store, layout, device)


def _abort_checks(layout: Layout, reader: RingReader, worker: Worker) -> AbortChecks:
    """Return the abort checks of a rank. Only rank 0 reads the abort flag, between layers; the other tensor ranks of
    its stage wait for its answer, so that all stop at the same layer. The C++ library does that by itself. Later stages
    are stopped by a message of the stage before."""
    is_first = layout.tp_rank == 0
    if not layout.is_first_stage or (worker.facts.is_batch_invariant and not is_first):
        return lambda step: None
    if worker.facts.is_batch_invariant or layout.tensor_parallel_size == 1:
        return lambda step: lambda: reader.abandoned >= step
    own = 0

    def agree(step: int) -> bool:
        nonlocal own
        own += 1
        if is_first:
            if reader.abandoned >= step:
                reader.stopped = own
            reader.checked = own
        while reader.checked < own:
            os.sched_yield()
        return reader.stopped == own

    return lambda step: lambda: agree(step)


def _reader(group: messages.Group, index: int) -> RingReader:
    return RingReader(group.memory, group.wakers[index], index, len(group.wakers))


def public_text(error: BaseException) -> str:
    """Return the text of an error for clients. Errors of other libraries may quote paths and prompts, so only the name
    of the class is given."""
    return str(error) if isinstance(error, HeadraceError) else type(error).__name__


def _end_with_parent(lifeline: Connection) -> NoReturn:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # the parent sends nothing more, so this returns when it ends
    os._exit(1)


# ----------------------------------------------------------------------------------------------------------------- rank
# A part of the model, and the execution of its driver's messages, whatever transport delivers them.


class Inbox(Protocol):
    """The driver's messages, in order."""

    @property
    def has_message(self) -> bool: ...
    def read(self) -> bytes:
        """Wait for the next message, and return it."""

    def count_step(self) -> None:
        """Count a finished step, for the driver."""


class Rank:
    """Executes its driver's messages. `send` sends to the driver. `link` is needed if there are several stages."""

    def __init__(self, layout: Layout, inbox: Inbox, send: Send, link: StageLink | None = None) -> None:
        self._layout = layout
        self.link = link
        self._unsampled: deque[int] = deque()  # steps that ran here and wait for the last stage's tokens
        self._inbox = inbox
        self._send = send
        self._decode = messages.down_decoder(lambda: _MasksToCome(self))
        self._waiting: deque[messages.Down] = deque()  # read while a step waited for its masks
        self._in_flight: deque[tuple[int, StepHandle]] = deque()
        self._profile: HostProfile | TorchProfile | None = None
        self._step = 0

    def agree(self, size: KVCacheSize) -> KVCacheSize:
        """Return a KV cache that all ranks can have, with sizes in bytes summed over the ranks."""
        own = {name: getattr(size, name) for name in messages.CacheSize.__struct_fields__}
        self._send(messages.CacheSize(**own))
        agreed = self._next()
        assert isinstance(agreed, messages.CacheSize)
        return replace(
            size,
            **msgspec.structs.asdict(agreed),
            num_tokens=size.num_tokens // size.block_size * agreed.num_blocks // size.num_blocks * size.block_size,
        )

    def serve(self, worker: Worker, cost: str, vocab_size: int, abort_checks: AbortChecks) -> None:
        """Send `Loaded`, then execute the driver's messages until the process ends."""
        size = worker.kv_cache_size
        self._send(
            messages.Loaded(
                num_blocks=size.num_blocks,
                block_size=size.block_size,
                vocab_size=vocab_size,
                max_model_len=size.max_model_len,
                pipeline_depth=worker.pipeline_depth,
                facts=worker.facts,
                computes=worker.computes,
                device_name=device_name(worker.device),
                kv_cache=f"{size}{cost}",
            )
        )
        while True:
            has_message = bool(self._waiting) or self._inbox.has_message
            if self._in_flight and (not has_message or len(self._in_flight) == worker.pipeline_depth):
                self._finish(worker)
                continue
            match self._waiting.popleft() if self._waiting else self._next():
                case messages.Step() as step:
                    self._submit(worker, step, abort_checks)
                case messages.Call(name):
                    while self._in_flight:
                        self._finish(worker)
                    self._send(self._call(worker, name))
                case messages.Masks():  # the masks of a step that failed before it read them
                    pass
                case messages.CacheSize():
                    raise ValueError("the size of the KV cache has been agreed upon")

    def masks(self) -> TokenMasks:
        """Wait for the masks of the running step. Other messages wait until it is over."""
        while True:
            message = self._next()
            if isinstance(message, messages.Masks):
                if message.step == self._step:
                    return message.masks()
            else:
                self._waiting.append(message)

    def _next(self) -> messages.Down:
        return self._decode(self._inbox.read())

    def _submit(self, worker: Worker, step: messages.Step, abort_checks: AbortChecks) -> None:
        self._step = step.number
        if not self._layout.is_last_stage:
            self._record(worker, step)
        if self.link is not None:
            self.link.begin(step.number)
        handle: StepHandle
        try:
            handle = worker.runner.submit(step.plan, abort_checks(self._step))
        except Exception as error:
            handle = FinishedStep(error)
            if self.link is not None and step.plan.request_ids:
                self.link.fail(error)
        else:
            if step.plan.request_ids and not self._layout.is_last_stage:
                self._unsampled.append(step.number)
        self._in_flight.append((self._step, handle))

    def _record(self, worker: Worker, step: messages.Step) -> None:
        """Record the tokens that the last stage sampled in earlier steps."""
        assert isinstance(worker.runner, ModelRunner)
        for number, sampled in sorted(step.sampled.items()):
            if self._unsampled and self._unsampled[0] == number:
                self._unsampled.popleft()
                worker.runner.record(sampled)

    def _finish(self, worker: Worker) -> None:
        step, handle = self._in_flight.popleft()
        if step % STEPS_BETWEEN_EXPERT_LOADS == 0 and self._layout.tp_rank == 0:
            self._send(messages.ExpertTokens(worker.tokens_of_experts()))
        try:
            output = handle.result()
            if self._layout.is_last_stage and self._layout.tp_rank == 0:
                self._send(messages.Output(step, output))
        except Exception as error:
            self._send(messages.Failed(step, ErrorInWords.of(error)))
        self._inbox.count_step()

    def _call(self, worker: Worker, name: str) -> messages.Answer:
        try:
            if name == "prepare":
                return messages.Answer(worker.runner.prepare())
            if name == "start_profile":
                self._profile = worker.start_profile()
            elif name == "stop_profile" and self._profile is not None:
                profile, self._profile = self._profile, None
                return messages.Answer(profile.stop())
        except Exception as error:
            return messages.Answer(error=ErrorInWords.of(error))
        return messages.Answer()


class _MasksToCome:
    """A `MasksHandle` of masks that follow their step's message."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def result(self) -> TokenMasks:
        return self._rank.masks()


if __name__ == "__main__":
    main()
