"""Measure the time of a plan to every rank: `python -m loadtest.rank_messages --ranks 2`.

The writer sends plans of 64 requests that decode, some milliseconds apart, as between steps; each reader, a process of
its own as ranks are, notes how long ago each was begun to be written. A sample is the slowest reader's. What else runs
on the machine counts too: `chrt -f 10` before the command leaves that out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import msgspec
import numpy as np

from engine.plan import SchedulerOutput
from gpu.parallel.links import RingReader, RingWriter
from gpu.parallel.messages import Step, encode

SLEEPING = 0.001  # seconds: a gap as long as that is one in which the engine sleeps


def write(num_ranks: int, num_plans: int, gap: float) -> None:
    ring = RingWriter(num_ranks)
    readers, results = [], []
    for index in range(num_ranks):
        result, theirs = os.pipe()
        memory, waker = ring.memory, ring.wakers[index]
        arguments = [__spec__.name, "--read", *map(str, (memory, waker, index, num_ranks, num_plans, theirs))]
        readers.append(subprocess.Popen([sys.executable, "-m", *arguments], pass_fds=(memory, waker, theirs)))
        os.close(theirs)
        results.append(result)
    time.sleep(1.0)  # until they have been started
    names = [f"cmpl-0123456789abcdef-{number}" for number in range(64)]
    began = []
    for number in range(num_plans):
        if gap >= SLEEPING:
            time.sleep(gap)
        until = time.monotonic() + (gap if gap < SLEEPING else 0.0)
        while time.monotonic() < until:  # as an engine does that is at work
            pass
        began.append(time.monotonic_ns())
        plan = SchedulerOutput.made_up([], [], names, [1] * 64, [1] * 64)
        ring.write(encode(Step(number + 1, plan)))
    arrived = [msgspec.msgpack.decode(b"".join(iter(lambda: os.read(result, 2**16), b""))) for result in results]  # noqa: B023
    seconds = (np.array(arrived).max(axis=0) - np.array(began)) / 1e9
    told = ", ".join(f"p{each} {np.percentile(seconds, each) * 1e6:.0f} µs" for each in (50, 90, 99, 99.9))
    print(f"{num_plans} plans to {num_ranks} ranks, {gap * 1e3:g} ms apart: {told}")


def read(memory: int, waker: int, index: int, num_ranks: int, num_plans: int, result: int) -> None:
    ring = RingReader(memory, waker, index, num_ranks)
    arrived = []
    for _ in range(num_plans):
        ring.read()
        arrived.append(time.monotonic_ns())
    os.write(result, msgspec.msgpack.encode(arrived))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--gap", type=float, default=0.002, help="seconds between two plans")
    parser.add_argument("--read", type=int, nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(*given.read)
    else:
        write(given.ranks, given.plans, given.gap)
