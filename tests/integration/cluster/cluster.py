"""A Ray cluster for as long as a test needs it, and Ray in processes of its own: who imports it keeps it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.harness import REPOSITORY, TIMEOUT


@dataclass(frozen=True)
class RayCluster:
    address: str
    pid: int  # of the process whose children its machines are

    def ranks(self) -> list[int]:
        """The process ids of those that live."""
        return actors(self.pid, "RankActor")


@contextmanager
def cluster(*num_cpus: int) -> Iterator[RayCluster]:
    """Whose machines have so many cores each."""
    command = [sys.executable, "-m", "tests.integration.cluster.machines", *map(str, num_cpus)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as machines:
        assert machines.stdout is not None
        while ":" not in (line := machines.stdout.readline()) or " " in line.strip():
            assert line, "the machines have ended"
        try:
            yield RayCluster(line.strip(), machines.pid)
        finally:
            machines.send_signal(signal.SIGTERM)
            machines.wait(TIMEOUT)


def actors(pid: int, kind: str) -> list[int]:
    """Actors on machines that a process has started. Others may have a cluster on this one, too."""
    return [each for each, name in family(pid).items() if name.startswith(f"ray::{kind}")]


def family(pid: int) -> dict[int, str]:
    """A process and all that were started for it, by their ids, with their names."""
    parents = {int(stat.parent.name): parent(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat")}
    found = {pid}
    while more := {each for each, its_parent in parents.items() if its_parent in found} - found:
        found |= more
    return {each: name for each in found if (name := name_of(each))}


def parent(pid: int | str) -> int:
    """0 of one that has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def name_of(pid: int) -> str:
    """Empty of one that has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
