"""The main of one rank's process: `python -m gpu.parallel.rank_main`, started by `gpu.parallel.multiproc`.

It belongs to the process that started it: no signal of a terminal or a supervisor reaches it, and the kernel ends it
with its parent, also when it has been stopped.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from engine.child_main import ignore_signals
from engine.errors import ErrorInWords, HeadraceError
from gpu.checkpoint import ModelFiles, open_model
from gpu.parallel.links import RingReader, RingWriter, StageLink
from gpu.parallel.messages import Failed, Group, Progress, RankSetup, Up, encode
from gpu.parallel.rank import Abandoned, Rank
from gpu.runner.runner import NO_LINKS
from gpu.sharding import Layout

if TYPE_CHECKING:
    from gpu.runner.runner import WorkerOptions
    from gpu.worker import Worker


logger = logging.getLogger(__name__)


def main(configure: Callable[[RankSetup], None] = lambda setup: None) -> NoReturn:
    """`configure` is called first, with what the driver has sent."""
    ignore_signals(signal.SIGTSTP)
    up = Connection(int(sys.argv[1]))
    setup = msgspec.msgpack.decode(up.recv_bytes(), type=RankSetup)
    configure(setup)
    threading.Thread(target=_end_with_parent, args=(up,), name="lifeline", daemon=True).start()
    reader = _reader(setup.ring, setup.layout.rank)
    try:
        _serve(setup, reader, lambda message: up.send_bytes(encode(message)))
    except BaseException as error:
        reader.leave_words(in_few_words(error))
        if not isinstance(error, HeadraceError):  # which tells everything, and is told
            logger.critical("this rank ends", exc_info=True)
            logging.shutdown()
    os._exit(1)  # neither a library's thread nor its exit handler may hold up the end


def _serve(setup: RankSetup, reader: RingReader, tell: Callable[[Up], None]) -> None:
    layout, link = setup.layout, None
    if layout.pipeline_parallel_size > 1:
        before = None if setup.before is None else _reader(setup.before, layout.tp_rank)
        after = None if setup.after is None else RingWriter.inherited(setup.after.memory, setup.after.wakers)
        link = StageLink(before, after, is_last=layout.is_last_stage)
    rank = Rank(layout, reader, tell, reader.count_step, link)
    try:
        worker, cost, vocab_size = load(setup, rank, tell, join_on_this_machine)
    except HeadraceError as error:
        tell(Failed(-1, ErrorInWords.of(error)))
        raise
    rank.serve(worker, cost, vocab_size, _abandoned(layout, reader, worker))


Join = Callable[[RankSetup, "WorkerOptions", ModelFiles], Any]
"""Makes the communicator of a rank."""


def load(setup: RankSetup, rank: Rank, tell: Callable[[Up], None], join: Join) -> tuple[Worker, str, int]:
    """The worker, what it says of its weights, and the vocabulary's size. `join` makes the communicator."""
    from gpu.executor import load_worker
    from gpu.model_loader import use_device
    from gpu.runner.runner import WorkerOptions

    files = open_model(
        setup.model,
        cache_dir=None if setup.cache_dir is None else Path(setup.cache_dir),
        load_format=setup.load_format,
        seed=setup.seed,
        progress=lambda phase, done, total: tell(Progress(phase, done, total)),
    )
    options = replace(WorkerOptions(), **setup.options)
    use_device(options.device)  # before the ranks connect, which may use their devices
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
    """Between the tensor ranks of its stage, where there are several: on a CPU they share memory, whoever computes."""
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


def _abandoned(layout: Layout, reader: RingReader, worker: Worker) -> Abandoned:
    """Who asks whether a step is still wanted: the first rank, between layers. Where others compute the same layers,
    all have to stop at the same one: so they wait for its answer. The library sees to that by itself. Later stages hear
    of it from the one before."""
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


def in_few_words(error: BaseException) -> str:
    """What may be told to anybody: what is foreign to us may quote paths and prompts."""
    return str(error) if isinstance(error, HeadraceError) else type(error).__name__


def _end_with_parent(lifeline: Connection) -> NoReturn:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # nothing more is ever sent: it returns at the end
    os._exit(1)


if __name__ == "__main__":
    main()
