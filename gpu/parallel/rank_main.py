"""The main module of a rank's process: `python -m gpu.parallel.rank_main`, started by `gpu.parallel.multiproc`.

The process ignores signals to its group. The kernel kills it when its parent ends, even if it is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from engine.child_main import ignore_signals
from engine.errors import ErrorInWords, HeadraceError
from gpu.checkpoint import ModelFiles, open_model
from gpu.parallel.links import RingReader, RingWriter, StageLink
from gpu.parallel.messages import Failed, Group, LoadProgress, RankSetup, Up, encode
from gpu.parallel.rank import AbortChecks, Inbox, Rank
from gpu.runner.runner import NO_LINKS
from gpu.sharding import Layout

if TYPE_CHECKING:
    from gpu.runner.runner import WorkerOptions
    from gpu.worker import Worker


logger = logging.getLogger(__name__)


def main(configure: Callable[[RankSetup], None] = lambda setup: None) -> NoReturn:
    """Run a rank until its process ends. `configure` is called first, with the driver's first message."""
    ignore_signals(signal.SIGTSTP)
    up = Connection(int(sys.argv[1]))
    setup = msgspec.msgpack.decode(up.recv_bytes(), type=RankSetup)
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
        serve(setup, reader, link, lambda message: up.send_bytes(encode(message)), join_on_this_machine, checks)
    except BaseException as error:
        reader.leave_end_reason(public_text(error))
        if not isinstance(error, HeadraceError):  # the driver logs the text of a HeadraceError
            logger.critical("this rank ends", exc_info=True)
            logging.shutdown()
    os._exit(1)  # without waiting for a library's threads and exit handlers


Join = Callable[[RankSetup, "WorkerOptions", ModelFiles], Any]
"""Makes the communicator of a rank."""


def serve(
    setup: RankSetup,
    inbox: Inbox,
    link: StageLink | None,
    send: Callable[[Up], None],
    join: Join,
    abort_checks: Callable[[Worker], AbortChecks],
) -> None:
    """Load a rank, then execute its driver's messages until the process ends. `join` makes the communicator."""
    rank = Rank(setup.layout, inbox, send, link)
    try:
        worker, cost, vocab_size = _load(setup, rank, send, join)
    except HeadraceError as error:
        send(Failed(-1, ErrorInWords.of(error)))
        raise
    rank.serve(worker, cost, vocab_size, abort_checks(worker))


def _load(setup: RankSetup, rank: Rank, send: Callable[[Up], None], join: Join) -> tuple[Worker, str, int]:
    """Return the worker, the sentence for the log about its quantization error, and the vocabulary's size."""
    from gpu.executor import load_worker
    from gpu.model_loader import use_device
    from gpu.runner.runner import WorkerOptions

    files = open_model(
        setup.model,
        cache_dir=None if setup.cache_dir is None else Path(setup.cache_dir),
        load_format=setup.load_format,
        seed=setup.seed,
        progress=lambda phase, done, total: send(LoadProgress(phase, done, total)),
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


def join_on_this_machine(setup: RankSetup, options: WorkerOptions, files: ModelFiles) -> Any:
    """Return the communicator of the tensor ranks of a stage, None for one rank. On a CPU they share memory."""
    from gpu.cpu.library import load_library
    from gpu.model_loader import library_for, resolve_device

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


def _reader(group: Group, index: int) -> RingReader:
    return RingReader(group.memory, group.wakers[index], index, len(group.wakers))


def public_text(error: BaseException) -> str:
    """Return the text of an error for clients. Errors of other libraries may quote paths and prompts, so only the name
    of the class is given."""
    return str(error) if isinstance(error, HeadraceError) else type(error).__name__


def _end_with_parent(lifeline: Connection) -> NoReturn:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # the parent sends nothing more, so this returns when it ends
    os._exit(1)


if __name__ == "__main__":
    main()
