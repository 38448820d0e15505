"""Tenants take turns at a few threads, and a thread is taken until its function has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engine.fairness import FairThreads, current_tenant

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


class Work:
    """Functions that run until they are let go, and the order in which they began."""

    def __init__(self, size: int) -> None:
        self.threads = FairThreads(size)
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    async def run(self, tenant: str, name: str) -> None:
        current_tenant.set(tenant)
        self.gates[name] = threading.Event()
        await self.threads.run(lambda: self._run(name))

    def has_begun(self, count: int) -> bool:
        return len(self.began) >= count

    def _run(self, name: str) -> None:
        self.began.append(name)
        assert self.gates[name].wait(30)


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - threads tell nobody
            await anyio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await checkpoint()


async def test_a_tenant_waits_for_one_turn_of_each_other_and_not_for_all_of_them() -> None:
    work = Work(1)
    async with anyio.create_task_group() as group:
        for tenant, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
            group.start_soon(work.run, tenant, name)
            await settle()
        for count in range(6):
            await until(partial(work.has_begun, count + 1))
            work.gates[work.began[-1]].set()
    assert work.began == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_a_thread_whose_caller_has_left_is_taken_until_it_ends() -> None:
    work = Work(2)
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as leaving:
            for number in range(2):
                leaving.start_soon(work.run, "a", f"gone-{number}")
            await until(lambda: len(work.began) == 2)
            leaving.cancel_scope.cancel()
        group.start_soon(work.run, "a", "next")
        await settle()
        await anyio.sleep(0.05)
        assert sorted(work.began) == ["gone-0", "gone-1"]
        work.gates["gone-1"].set()
        await until(lambda: "next" in work.began)
        work.gates["next"].set()
        work.gates["gone-0"].set()


async def test_who_leaves_while_it_waits_never_begins_and_leaves_no_gap() -> None:
    work = Work(1)
    async with anyio.create_task_group() as group:
        group.start_soon(work.run, "a", "a1")
        await until(lambda: work.began == ["a1"])
        for _ in range(3):
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(work.run, "b", "gone")
                await settle()
                leaving.cancel_scope.cancel()
        group.start_soon(work.run, "b", "b1")
        await settle()
        work.gates["a1"].set()
        await until(lambda: work.began == ["a1", "b1"])
        work.gates["b1"].set()
    assert work.threads._free == 1
    assert not work.threads._waiting._lines


async def test_whenever_a_caller_leaves_its_turn_comes_back_once() -> None:
    threads = FairThreads(3)
    for delay in range(60):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(threads.run, lambda: None)
            for _ in range(delay % 20):
                await checkpoint()
            group.cancel_scope.cancel()
    await until(lambda: threads._free == 3)
    await anyio.sleep(0.02)
    assert threads._free == 3
    assert not threads._waiting._lines


async def test_what_a_function_returns_and_raises_comes_back() -> None:
    threads = FairThreads(1)
    assert await threads.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(cast("Callable[[], object]", lambda: None)) is None


class Gate:
    """Functions that end when they are let through, and how many are running."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self._lock = threading.Lock()
        self._open = threading.Event()

    def pass_through(self) -> int:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self._open.wait(30)
        with self._lock:
            self.running -= 1
        return 7

    def open(self) -> None:
        self._open.set()


async def test_who_must_not_leave_waits_for_the_end() -> None:
    threads, gate = FairThreads(1), Gate()

    async def run() -> None:
        await threads.run(gate.pass_through, abandon=False)

    async with anyio.create_task_group() as callers:
        callers.start_soon(run)
        await until(lambda: gate.running)
        callers.cancel_scope.cancel()
        threading.Timer(0.05, gate.open).start()
    assert gate.running == 0


async def test_what_a_function_raises_is_the_callers() -> None:
    threads = FairThreads(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
