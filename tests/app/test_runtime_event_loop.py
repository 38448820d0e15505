"""Whoever holds the event loop is found, and watching changes nothing for those who are watched."""

from __future__ import annotations

import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from app.config.settings import Settings
from app.http.scope import Bodies, RequestScope
from app.runtime import FIRST_READS, INLINE_BODY_BYTES, LAG_PERIOD, Workload, in_steps, measure_lag
from protocol.errors import ApiError
from tests.support.harness import TIMEOUT


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


pytestmark = pytest.mark.anyio


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_is_a_hold_and_waiting_is_none() -> None:
    async def work() -> None:
        await anyio.sleep(0.2)
        burn(0.05)
        await anyio.sleep(0.2)

    steps: list[float] = []
    await in_steps(work(), steps.append)
    assert max(steps) >= 0.05
    assert sum(steps) < 0.2  # half of what it took


async def test_an_exception_passes_and_a_cancellation_arrives() -> None:
    seen: list[str] = []

    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise LookupError

    async def stay() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            seen.append("cleaned up")

    with pytest.raises(LookupError):
        await in_steps(fail(), lambda seconds: None)
    with anyio.move_on_after(0.01) as scope:
        await in_steps(stay(), lambda seconds: None)
    assert scope.cancelled_caught
    assert seen == ["cleaned up"]


async def test_a_loop_that_is_held_lags() -> None:
    lags: list[float] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure_lag, lags.append)
        await anyio.sleep(0.05)
        time.sleep(4 * LAG_PERIOD)  # noqa: ASYNC251 - a blocking call, which burns nothing
        while max(lags, default=0.0) < 2 * LAG_PERIOD:  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_the_first_requests_of_each_route_are_read_on_threads_until_its_models_are_built() -> None:
    async def never(*_: Any) -> Any:
        await anyio.sleep_forever()

    def request(endpoint: object, body: bytes = b"{}") -> RequestScope:
        scope = {"type": "http", "method": "POST", "path": "/", "http_version": "1.1", "query_string": b""}
        made = RequestScope(scope | {"headers": [], "endpoint": endpoint}, never, never, Settings(), bodies)
        made.body = body
        return made

    def fail() -> None:
        raise ApiError(400, "This is not JSON.")

    async def read_together() -> None:
        assert await workload.read(request(chat), lambda: together.wait(TIMEOUT) >= 0)

    bodies, workload, here = Bodies(None), Workload(), threading.get_ident()
    chat, messages = object(), object()
    for _ in range(2 * FIRST_READS):
        with pytest.raises(ApiError):
            await workload.read(request(chat), fail)
    together = threading.Barrier(2)
    async with anyio.create_task_group() as tasks:  # a thread each, or the first would wait for ever
        tasks.start_soon(read_together)
        tasks.start_soon(read_together)
    for _ in range(FIRST_READS - 2):
        assert await workload.read(request(chat), threading.get_ident) != here
    assert await workload.read(request(chat), threading.get_ident) == here, "all later short ones stay on the loop"
    assert await workload.read(request(chat, bytes(INLINE_BODY_BYTES + 1)), threading.get_ident) != here
    assert await workload.read(request(messages), threading.get_ident) != here
