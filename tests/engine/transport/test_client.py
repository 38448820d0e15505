"""The engine in its thread: how it starts, idles, wakes the loop, dies, and ends with its scope."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import anyio
import pytest

from engine.core.core import EngineCore, IsAbandoned
from engine.errors import EngineDead
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreOutputs, FinishReason
from engine.transport.client import ThreadClient, run_loop
from tests.engine.helpers import count_wake_ups, make_request
from tests.engine.serving import TOKENIZER, collect, read_one, running

pytestmark = pytest.mark.anyio


async def test_the_loop_is_woken_at_most_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = count_wake_ups(monkeypatch)
    async with running() as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(6):
                tasks.start_soon(read_one, engine, make_request(range(i, i + 9), max_tokens=40))
        await engine.idle()
        assert 0 < len(wake_ups) <= engine.core.num_steps + 1  # and one for EngineReady


async def test_an_idle_engine_makes_no_steps_and_burns_no_cpu() -> None:
    async with running() as engine:
        await read_one(engine, make_request(range(9), max_tokens=5))
        await engine.idle()
        clock = time.pthread_getcpuclockid(engine_threads()[0])
        num_steps = engine.core.num_steps
        for _ in range(50):  # on a busy machine it may take a while to go to sleep
            used = time.clock_gettime_ns(clock)
            await anyio.sleep(0.1)
            if time.clock_gettime_ns(clock) == used:
                break
        else:
            pytest.fail("it never stands still")
        assert engine.core.num_steps == num_steps


async def test_what_loading_failed_with_is_told_to_who_waits_and_who_comes_later() -> None:
    def fail() -> EngineCore:
        raise FileNotFoundError("no model there")

    llm = AsyncLLM(ThreadClient(fail), TOKENIZER)
    async with llm.running():
        with pytest.raises(FileNotFoundError, match="no model there"):
            await llm.wait_ready()
        with pytest.raises(EngineDead) as dead:
            async with llm.stream(make_request([1])):
                pass
        assert isinstance(dead.value.__cause__, FileNotFoundError)
        assert llm.ready is None
    assert not engine_threads()


class MortalCore(EngineCore):
    def step(self, is_abandoned: IsAbandoned = lambda request_ids: False) -> EngineCoreOutputs:
        if self.num_steps == 3:
            raise LookupError("a bug in the engine")
        return super().step(is_abandoned)


async def test_when_the_engine_dies_open_streams_and_later_ones_say_so() -> None:
    async with running(MortalCore) as engine:
        received: list[int] = []
        with pytest.raises(EngineDead) as dead:  # noqa: PT012
            async with engine.llm.stream(make_request(range(9), n=2)) as stream:
                async for output in stream:
                    received += output.token_ids
        assert isinstance(dead.value.__cause__, LookupError)
        assert received  # what came before it died was delivered
        with pytest.raises(EngineDead):
            async with engine.llm.stream(make_request([1])):
                pass
        assert isinstance(await engine.llm.wait_dead(), LookupError)
        assert engine.llm.num_open_choices == 0
        assert engine.executor.is_shut_down
        assert [finished.reason for finished in engine.observer.finished] == [FinishReason.ERROR]


async def test_streams_still_open_when_the_engine_is_shut_down_get_engine_dead() -> None:
    errors: list[Exception] = []

    async def read(llm: AsyncLLM, opened: anyio.Event) -> None:
        try:
            async with llm.stream(make_request(range(9), max_tokens=100)) as stream:
                opened.set()
                await collect(stream)
        except EngineDead as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks, running(block_size=16) as engine:
        engine.executor.step_seconds = 0.005
        opened = anyio.Event()
        tasks.start_soon(read, engine.llm, opened)
        await opened.wait()
    assert len(errors) == 1
    assert engine.executor.is_shut_down


@pytest.mark.parametrize("how", ["left", "cancelled", "failed"])
async def test_the_engines_thread_ends_with_its_scope(how: str) -> None:
    async def live_once() -> None:
        with anyio.CancelScope() as scope:
            async with running() as engine:
                await read_one(engine, make_request(range(9), max_tokens=5))
                assert len(engine_threads()) == 1
                if how == "cancelled":
                    scope.cancel()
                    await anyio.sleep_forever()
                if how == "failed":
                    raise ZeroDivisionError
        assert engine.executor.is_shut_down

    for turn in range(3):
        try:
            await live_once()
        except* ZeroDivisionError:
            assert how == "failed"
        assert not engine_threads()
        if turn == 0:
            num_threads = threading.active_count()  # the loop keeps the idle worker thread for its next user
    assert threading.active_count() <= num_threads


def engine_threads() -> list[int]:
    """Identifiers of the threads that run an engine now."""

    def runs_engine(frame: Any) -> bool:
        while frame is not None:
            if frame.f_code is run_loop.__code__:
                return True
            frame = frame.f_back
        return False

    return [ident for ident, frame in sys._current_frames().items() if runs_engine(frame)]
