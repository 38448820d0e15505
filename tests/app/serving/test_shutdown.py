"""One sign to stop is one sign, however it arrives."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds

SIGNAL_AFTER_THE_PARENTS_WORD = """
import os, signal, sys
import anyio
from app.serving.process import Shutdown

async def drain():
    for _ in range(int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep(0.1)

async def main():
    shutdown = Shutdown(drain, has_parent=True)
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(shutdown.listen_for_signals)
        await anyio.sleep(0.1)
        await shutdown.wait_and_drain(anyio.lowlevel.checkpoint)
        task_group.cancel_scope.cancel()

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_signal_that_comes_with_the_parents_word_is_not_a_second_one(backend: str) -> None:
    assert status_after(backend, num_signals=1) == 0
    assert status_after(backend, num_signals=2) == 128 + 15


def status_after(backend: str, num_signals: int) -> int:
    script = [sys.executable, "-c", SIGNAL_AFTER_THE_PARENTS_WORD, backend, str(num_signals)]
    return subprocess.run(script, check=False).returncode
