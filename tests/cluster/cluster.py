"""A Ray cluster for as long as a test needs it, and Ray in processes of its own: who imports it keeps it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.server.harness import REPOSITORY, TIMEOUT


@contextmanager
def cluster(*num_cpus: int) -> Iterator[str]:
    """The address of one whose machines have so many cores each."""
    command = [sys.executable, "-m", "tests.cluster.machines", *map(str, num_cpus)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as machines:
        assert machines.stdout is not None
        while ":" not in (line := machines.stdout.readline()) or " " in line.strip():
            assert line, "the machines have ended"
        yield line.strip()
        machines.send_signal(signal.SIGTERM)
        machines.wait(TIMEOUT)
