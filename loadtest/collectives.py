"""An all-reduce between ranks of this machine: through shared memory, and gloo's, by turns.

    python -m loadtest.collectives [--ranks 2] [--floats 576] [--calls 500] [--rounds 15]

Both are timed in the same processes, a round of calls of one and then of the other, and a ratio is of the two
of a round: other work on the machine makes both slower. Printed are microseconds a call, best and median of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from gpu.cpu.communicator import SharedMemoryCommunicator, make_segment
from gpu.cpu.library import load_library


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def work(options: argparse.Namespace, rank: int, segment: int, store: str, results: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    library = load_library()
    assert library is not None
    ranks = SharedMemoryCommunicator(library, segment, rank, options.ranks)
    values, tensor = np.ones(options.floats, np.float32), torch.ones(options.floats)
    address, count, reduce = values.ctypes.data, values.size, library.functions.hr_all_reduce
    rounds = []
    for _ in range(options.rounds + 1):
        values.fill(1)
        ours = microseconds(lambda: reduce(ranks.handle, address, count), options.calls)
        tensor.fill_(1)
        gloo = microseconds(lambda: dist.all_reduce(tensor), options.calls)
        rounds.append((ours, gloo))
    results.send(rounds[1:])  # the first one warms up
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--floats", type=int, default=576)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    context, segment = multiprocessing.get_context("fork"), make_segment()
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(options, rank, segment, f"{folder}/store", theirs) for rank in range(options.ranks)]
        processes = [context.Process(target=work, args=each) for each in arguments]
        for process in processes:
            process.start()
        rounds = ours.recv()
        for process in processes:
            process.join()
    os.close(segment)
    print(f"all-reduce of {options.floats} floats, {options.ranks} ranks, {os.cpu_count()} cores; microseconds a call")
    for name, times in zip(("shared memory", "gloo"), zip(*rounds, strict=True), strict=True):
        print(f"{name:14} best {min(times):8.1f}  median {statistics.median(times):8.1f}")
    print(f"gloo / shared memory: {statistics.median(gloo / own for own, gloo in rounds):.1f}")


if __name__ == "__main__":
    main()
