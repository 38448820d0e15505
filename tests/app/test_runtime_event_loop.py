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
from app.runtime import INLINE_BODY_BYTES, LAG_PERIOD, Workload, in_steps, measure_lag


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


async def test_the_first_request_of_each_route_is_read_on_a_thread_where_it_builds_its_models() -> None:
    async def never(*_: Any) -> Any:
        await anyio.sleep_forever()

    def request(path: str, endpoint: object, body: bytes = b"{}") -> RequestScope:
        scope = {"type": "http", "method": "POST", "path": path, "http_version": "1.1", "query_string": b""}
        made = RequestScope(scope | {"headers": [], "endpoint": endpoint}, never, never, Settings(), bodies)
        made.body = body
        return made

    bodies, workload, here = Bodies(None), Workload(), threading.get_ident()
    chat, messages = object(), object()
    first, other = request("/chat/1", chat), request("/messages", messages)
    for each in (first, first, other):
        assert await workload.read(each, threading.get_ident) != here
    for each in (request("/chat/2", chat), request("/messages", messages)):
        assert await workload.read(each, threading.get_ident) == here, "all later short ones stay on the loop"
    long = request("/chat/1", chat, bytes(INLINE_BODY_BYTES + 1))
    assert await workload.read(long, threading.get_ident) != here
