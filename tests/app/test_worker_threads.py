"""Worker threads: their number holds whoever leaves, and what nobody waits for is not begun."""

from __future__ import annotations

import threading

import anyio
import pytest

from app.worker_threads import WorkerThreads

PATIENCE = 60.0


async def test_what_the_call_returns_or_raises_is_the_callers() -> None:
    threads = WorkerThreads(2, "test")
    assert await threads.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(threading.get_ident) != threading.get_ident()


async def test_callers_that_leave_do_not_make_room_for_more_threads() -> None:
    threads = WorkerThreads(2, "test")
    lock, release = threading.Lock(), threading.Event()
    began = running = most = 0

    def work() -> None:
        nonlocal began, running, most
        with lock:
            began += 1
            running += 1
            most = max(most, running)
        release.wait(PATIENCE)
        with lock:
            running -= 1

    try:
        for _ in range(4):
            with anyio.move_on_after(0.02):
                await threads.run(work)
        with anyio.fail_after(PATIENCE):
            while began < 2:  # noqa: ASYNC110 - threads count it
                await anyio.sleep(0.001)
    finally:
        release.set()
    with anyio.fail_after(PATIENCE):
        assert await threads.run(lambda: "still") == "still"
    assert (began, most) == (2, 2), "those who left before their turn have none"
