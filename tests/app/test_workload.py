"""Requests that come at once begin one after the other, and the event loop has time for others in between."""

from __future__ import annotations

from itertools import groupby

import anyio
import pytest
from anyio.lowlevel import checkpoint

from app.workload import Workload

pytestmark = pytest.mark.anyio

TOKEN = -1


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_between_two_requests_that_begin_tokens_come_through() -> None:
    workload = Workload()
    order: list[int] = []

    async def begin(number: int) -> None:
        await workload.turn()
        order.append(number)

    async def deliver_tokens() -> None:
        while True:
            await checkpoint()
            order.append(TOKEN)

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(deliver_tokens)
        async with anyio.create_task_group() as requests:
            for number in range(20):
                requests.start_soon(begin, number)
        task_group.cancel_scope.cancel()
    assert sorted(number for number in order if number != TOKEN) == list(range(20))
    longest = max(len(list(run)) for is_token, run in groupby(order, TOKEN.__eq__) if not is_token)
    assert longest <= 2  # trio draws who goes first in a turn of the loop


async def test_who_leaves_while_others_begin_holds_up_nobody() -> None:
    workload = Workload()
    async with anyio.create_task_group() as requests:
        for _ in range(5):
            requests.start_soon(workload.turn)
        requests.cancel_scope.cancel()
    with anyio.fail_after(5):
        await workload.turn()
