"""A process that is stopped ends, and its watcher with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = "from engine.child_main import end_when_stopped; end_when_stopped(); print(flush=True); input()"


@pytest.mark.seconds
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGSTOP, -signal.SIGKILL), (signal.SIGTERM, -signal.SIGTERM)])
def test_who_is_stopped_is_killed_and_nobody_is_left(sent: signal.Signals, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sent)
        assert process.wait() == status
        assert process.stdout.read() == b"", "the watcher has closed its end, too"
