"""A reader may leave a listener with its stream: nothing is lost, doubled or reordered between the two."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from engine.messages import FinishReason, RequestOutput
from engine.plan import SchedulerOutput
from tests.engine.helpers import make_request
from tests.engine.serving import collect, expected_tokens, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
async def test_what_the_listener_does_not_take_the_reader_gets_in_order(share: float) -> None:
    draw = random.Random(7)
    request = make_request(range(20), n=3, max_tokens=50)
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    taken = 0

    def listener(deltas: Collection[RequestOutput]) -> bool:
        nonlocal taken
        assert deltas, "it is called with something"
        if any(delta.finish_reason is not None for delta in deltas) or draw.random() >= share:
            return False
        for delta in deltas:
            got[delta.index] += delta.token_ids
            taken += len(delta.token_ids)
        return True

    async with running(num_blocks=128) as engine:
        engine.executor.step_seconds = 0.001  # else everything has come before the loop looks
        async with engine.llm.stream(request) as stream:
            stream.listen(listener)
            outputs = []
            async for output in stream:
                got[output.index] += output.token_ids
                outputs.append(output)
        expected = expected_tokens(make_request(range(20), max_tokens=50))
        assert got == {0: expected, 1: expected, 2: expected}
        assert [o.finish_reason for o in outputs if o.finish_reason is not None] == [FinishReason.LENGTH] * 3
        assert bool(taken) == bool(share)
        await engine.assert_nothing_left()


async def test_a_reader_that_waits_for_the_end_is_woken_once_and_gets_everything() -> None:
    async with running() as engine:
        request = make_request(range(12), n=2, max_tokens=40)
        async with engine.llm.stream(request) as stream:
            await stream.wait_finished()
            assert stream.num_unfinished == 0
            outputs = await collect(stream)
        assert [len(output.token_ids) for output in outputs] == [40, 40]
        await engine.assert_nothing_left()


async def test_who_waits_for_the_end_learns_of_a_failure_at_once() -> None:
    def break_one_choice(plan: SchedulerOutput) -> None:
        if any(request_id == stream.child_ids[1] for request_id in plan.request_ids):
            raise RuntimeError("the device broke")

    async with running(before_step=break_one_choice) as engine:
        engine.executor.step_seconds = 0.005
        async with engine.llm.stream(make_request(range(12), n=2, max_tokens=100)) as stream:
            await stream.wait_finished()
            assert stream.num_unfinished == 1, "the other choice goes on"
            assert FinishReason.ERROR in {output.finish_reason for output in stream.drain()}
        await engine.assert_nothing_left()
