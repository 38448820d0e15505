"""A process that is stopped answers nobody, and cannot say so: a child of its own sees it, and kills it.

For those whose parent is not ours; where it is, it is told (`gpu.parallel.rank_child`). What is looked at is the state,
not silence: a busy machine is not taken for a stopped process.
"""

from __future__ import annotations

import os
import subprocess
import sys

_WATCH = """
import os, signal, sys, time
watched = int(sys.argv[1])
while os.getppid() == watched:
    with open(f"/proc/{watched}/stat") as stat:
        if stat.read().rpartition(")")[2].split()[0] == "T":
            os.kill(watched, signal.SIGKILL)
    time.sleep(0.1)
"""


def end_when_stopped() -> None:
    """From now on this process is killed when it is stopped, and so is known to have ended."""
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
