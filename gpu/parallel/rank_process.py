"""The main of one rank's process: `python -m gpu.parallel.rank_process`, started by `gpu.parallel.rank_child`.

It belongs to the process that started it: no signal of a terminal or a supervisor reaches it, and the kernel ends it
with its parent, also when it has been stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from engine.errors import HeadraceError
from engine.errors_in_words import ErrorInWords
from gpu.checkpoint import open_model
from gpu.parallel.messages import Failed, Progress, Up, encode
from gpu.parallel.rank import Rank
from gpu.parallel.ring import RingReader

if TYPE_CHECKING:
    from gpu.worker import Worker

PR_SET_PDEATHSIG = 1


class RankSetup(msgspec.Struct, kw_only=True):
    """What a rank is told at its start."""

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    model: str
    cache_dir: str | None
    load_format: str
    options: dict[str, Any]  # of `gpu.model_loader.WorkerOptions`

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def main() -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, memory, waker = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    up = Connection(connection)
    setup = msgspec.msgpack.decode(up.recv_bytes(), type=RankSetup)
    threading.Thread(target=_end_with_parent, args=(up,), name="lifeline", daemon=True).start()
    reader = RingReader(memory, waker, setup.rank, setup.world_size)
    try:
        _serve(setup, reader, lambda message: up.send_bytes(encode(message)))
    except BaseException as error:
        reader.leave_words(_in_few_words(error))
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # neither a library's thread nor its exit handler may hold up the end


def _serve(setup: RankSetup, reader: RingReader, tell: Callable[[Up], None]) -> None:
    rank = Rank(reader, tell, reader.count_step)
    try:
        worker, cost, vocab_size = _load(setup, rank, tell)
    except HeadraceError as error:
        tell(Failed(-1, ErrorInWords.of(error)))
        raise
    rank.serve(worker, cost, vocab_size, lambda step: lambda: reader.abandoned >= step)


def _load(setup: RankSetup, rank: Rank, tell: Callable[[Up], None]) -> tuple[Worker, str, int]:
    from gpu.executor import load_worker
    from gpu.model_loader import WorkerOptions

    cache_dir = None if setup.cache_dir is None else Path(setup.cache_dir)
    files = open_model(
        setup.model,
        cache_dir=cache_dir,
        load_format=setup.load_format,
        progress=lambda phase, done, total: tell(Progress(phase, done, total)),
    )
    worker, cost = load_worker(files, replace(WorkerOptions(), **setup.options), agree=rank.agree)
    return worker, cost, files.config.vocab_size


def _in_few_words(error: BaseException) -> str:
    """What may be told to anybody: what is foreign to us may quote paths and prompts."""
    return str(error) if isinstance(error, HeadraceError) else type(error).__name__


def _end_with_parent(lifeline: Connection) -> NoReturn:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # nothing more is ever sent: it returns at the end
    os._exit(1)


if __name__ == "__main__":
    main()
