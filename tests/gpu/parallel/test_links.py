"""The ring by which a driver tells its ranks: between real processes, whatever the lengths, whoever is slow."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import HeadraceError
from gpu.parallel.links import RingReader, RingWriter

READER = """
import hashlib, os, sys, time
from gpu.parallel.links import RingReader
memory, waker, index, count, messages, delay, out = (float(word) if "." in word else int(word) for word in sys.argv[1:])
ring, seen = RingReader(memory, waker, index, count), hashlib.sha256()
for _ in range(messages):
    seen.update(ring.read())
    time.sleep(delay)
    ring.count_step()
ring.leave_end_reason("read it all")
os.write(out, seen.hexdigest().encode())
"""


class Readers:
    """Processes that read so many messages each, and then say what they have read."""

    def __init__(self, ring: RingWriter, delays: list[float], messages: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._results: list[int] = []
        for index, delay in enumerate(delays):
            result, theirs = os.pipe()
            memory, waker = ring.memory, ring.wakers[index]
            arguments = [memory, waker, index, len(delays), messages, delay, theirs]
            self.processes.append(
                subprocess.Popen([sys.executable, "-c", READER, *map(str, arguments)], pass_fds=(memory, waker, theirs))
            )
            os.close(theirs)
            self._results.append(result)

    def digests(self) -> list[str]:
        found = [b"".join(iter(partial(os.read, result, 64), b"")).decode() for result in self._results]
        assert [process.wait() for process in self.processes] == [0] * len(self.processes)
        return found


@contextmanager
def reading(ring: RingWriter, delays: list[float], messages: int) -> Iterator[Readers]:
    readers = Readers(ring, delays, messages)
    try:
        yield readers
    finally:
        for process in readers.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def test_every_reader_gets_every_message_in_order_whatever_their_lengths_and_its_pace() -> None:
    """Empty ones, ones that wrap around at every place, and ones many times as long as the ring."""
    chance = random.Random(0)
    lengths = [0, 1, 99_991, *(chance.choice([chance.randrange(64), chance.randrange(9_000)]) for _ in range(600))]
    messages = [chance.randbytes(length) for length in lengths]
    ring = RingWriter(3, capacity=4099)  # a prime: no frame ends where the ring does, but for chance
    with reading(ring, [0.0, 0.0005, 0.0], len(messages)) as readers:
        for message in messages:
            ring.write(message)
        assert readers.digests() == [hashlib.sha256(b"".join(messages)).hexdigest()] * 3
    assert [ring.steps(index) for index in range(3)] == [len(messages)] * 3
    assert ring.end_reason(1) == "read it all"
    ring.close()


def test_a_reader_that_stands_still_holds_up_the_writer_who_is_told_when_it_has_gone() -> None:
    ring = RingWriter(2, capacity=1000)
    with reading(ring, [0.0, 0.0], 10**6) as readers:
        ring.write(b"here")
        while readers_behind(ring):
            time.sleep(0.001)
        stopped = readers.processes[1]
        stopped.send_signal(signal.SIGSTOP)

        def check() -> None:
            if stopped.poll() is not None:
                raise ProcessLookupError

        while ring._room() > 112:
            ring.write(bytes(100))
        threading.Timer(0.2, stopped.kill).start()
        with pytest.raises(ProcessLookupError):
            ring.write(bytes(100), check)
        assert ring.steps(0) > 5, "the other one reads on"
    ring.close()


def readers_behind(ring: RingWriter) -> bool:
    return min(ring.steps(0), ring.steps(1)) < 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=20),
    st.integers(min_value=64, max_value=400),
    st.integers(min_value=0, max_value=2**32),
)
def test_what_was_not_written_to_its_end_is_never_read(messages: list[bytes], capacity: int, seed: int) -> None:
    """A writer may be cut off at any byte, or its writes be seen out of order: then the message is not there."""
    ring = RingWriter(1, capacity)
    reader = RingReader(os.dup(ring.memory), ring.wakers[0], 0, 1)
    chance = random.Random(seed)
    for message in messages:
        head = ring._head
        if len(message) + 9 <= capacity // 2:
            ring.write(message)
            assert reader.has_message
            if message:  # one byte of it is not to be seen yet
                place = (head + 9 + chance.randrange(len(message))) % capacity
                ring._ring[place] ^= 0xFF
                with pytest.raises(ValueError, match="damaged"):
                    take_frame_now(reader)
                ring._ring[place] ^= 0xFF
            assert reader.read() == message
        assert not reader.has_message
    ring.close()


def take_frame_now(reader: RingReader) -> None:
    import gpu.parallel.links

    patience, gpu.parallel.links.TORN_SECONDS = gpu.parallel.links.TORN_SECONDS, 0.0
    try:
        reader._take_frame()
    finally:
        gpu.parallel.links.TORN_SECONDS = patience


def test_memory_is_taken_before_it_is_touched_and_where_there_is_none_that_is_said() -> None:
    ring = RingWriter(1)
    made = os.fstat(ring.memory)
    assert 512 * made.st_blocks >= made.st_size > 2**22
    ring.close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(HeadraceError, match=r"refuses 4\.\d MiB of shared memory"):
            RingWriter(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_reader_with_nothing_to_read_takes_no_time() -> None:
    ring = RingWriter(1)
    with reading(ring, [0.0], 1) as readers:
        (process,) = readers.processes
        deadline, before = time.monotonic() + 60, -1
        # It may be seen in a call on the same descriptor while it still begins; who turned in a loop would never rest.
        while (now := processor_time(process.pid)) != before or not is_asleep(process.pid, ring.wakers[0]):
            assert time.monotonic() < deadline
            before = now
            time.sleep(0.5)
        ring.write(b"at last")
        assert readers.digests() == [hashlib.sha256(b"at last").hexdigest()]
    ring.close()


def is_asleep(pid: int, descriptor: int) -> bool:
    """Whether it waits in a system call whose first argument is this."""
    with open(f"/proc/{pid}/syscall") as file:
        return file.read().split()[1:2] == [hex(descriptor)]


def processor_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
