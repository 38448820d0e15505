"""Whoever asks an engine is answered between two steps, or told at once that nobody will answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from engine.commands import GetSnapshot
from engine.core.core import EVERYTHING, EngineCore
from engine.errors import EngineDead, RequestFailed, StepAbandoned
from engine.plan import SchedulerOutput
from engine.snapshot import EngineSnapshot, StepOutcome
from engine.transport.client import EngineClient
from tests.engine.helpers import count_wake_ups, make_core, make_request, simulated, until
from tests.engine.processes import Serving, Where, client, process_of, replicas, serving
from tests.engine.serving import Running, collect, running
from tests.selection import slow_except

pytestmark = [pytest.mark.anyio, pytest.mark.seconds]


@pytest.fixture(params=slow_except(["uvloop", "trio"], "uvloop"))
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """What is particular to an event loop is in the channel and in ProcessClient, whose tests run on all of them."""
    return ("trio", {}) if request.param == "trio" else ("asyncio", {"use_uvloop": True})


@pytest.fixture(params=["thread", "process"])
def where(request: pytest.FixtureRequest) -> Where:
    return request.param


async def look_at(engine: Serving | Running) -> EngineSnapshot:
    answers = await engine.llm.query(GetSnapshot())
    assert answers.keys() == {0}
    return answers[0]


async def test_an_idle_engine_is_woken_to_answer_and_sleeps_again(where: Where) -> None:
    async with serving(where) as engine:
        for num_steps in (0, 3):
            await until(lambda: engine.client.is_asleep)
            state = await look_at(engine)
            assert (state.running, state.waiting, state.num_steps_in_flight) == ((), (), 0)
            assert len(state.steps) == state.num_steps >= num_steps
            assert state.blocks.num_owned == 0
            assert state.blocks.num_cached + state.blocks.num_free == 64
            await engine.read(make_request(range(9), max_tokens=3))
        await until(lambda: engine.client.is_asleep)


async def test_a_busy_engine_answers_between_two_steps_after_what_was_sent_before(where: Where) -> None:
    async with serving(where, max_num_seqs=1, step_seconds=0.02) as engine:
        before = time.monotonic()
        async with engine.llm.stream(make_request(range(9), "first", max_tokens=100, n=2)) as stream:
            state = await look_at(engine)
            assert len(state.running) + len(state.waiting) == 2, "what was added before is there"
            await anext(stream)
            state = await look_at(engine)
            assert [request.request_id for request in state.running + state.waiting] == stream.child_ids
            assert [request.status for request in state.running + state.waiting] == ["running", "waiting"]
            assert state.running[0].num_output_tokens < 100, "it was answered before the request had ended"
            assert before < state.steps[0].time <= state.steps[-1].time < state.time < time.monotonic()
        state = await look_at(engine)
        assert (state.running, state.waiting) == ((), ()), "what was ended before is gone"
        await engine.assert_nothing_left()


async def test_many_ask_at_once_and_who_stops_waiting_leaves_nothing_behind(where: Where) -> None:
    async with serving(where, step_seconds=0.02) as engine:
        numbers: list[int] = []
        left = 0

        async def ask() -> None:
            nonlocal left
            try:
                numbers.append((await look_at(engine)).num_steps)
            except anyio.get_cancelled_exc_class():
                left += 1
                raise

        async with engine.llm.stream(make_request(range(9), max_tokens=50)) as stream:
            await anext(stream)
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(ask)
            assert len(numbers) == 20
            for turn in range(2, 100):
                async with anyio.create_task_group() as tasks:
                    for _ in range(20):
                        tasks.start_soon(ask)
                    await until(lambda: len(engine.client._queries._open) == 20)
                    tasks.cancel_scope.cancel()
                assert not engine.client._queries._open
                assert len(numbers) + left == 20 * turn
                if left:  # the engine was not quicker
                    break
            assert left
            await look_at(engine)  # the answers of those who left have come before this one, and harmed nobody
        await engine.assert_nothing_left()


async def test_a_question_wakes_the_loop_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = count_wake_ups(monkeypatch)
    async with running() as engine:
        num_before = len(wake_ups)
        for _ in range(10):
            await look_at(engine)
        assert len(wake_ups) - num_before <= 10
        assert engine.core.num_steps == 0, "nor is a step made for it"


async def test_when_the_engine_dies_who_has_asked_is_told(where: Where, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    async with serving(where, hang_while=str(hang), last_step=0) as engine:
        await until(lambda: engine.client.is_asleep)
        hang.touch()
        async with engine.llm.stream(make_request([1])) as stream:
            await until(lambda: not engine.client.is_asleep)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_expect_dead, engine)
                await until(lambda: engine.client._queries._open)
                await anyio.sleep(0.05)
                hang.unlink()
            with pytest.raises(EngineDead):
                await collect(stream)
        await _expect_dead(engine)
        assert not engine.client._queries._open


async def _expect_dead(engine: Serving) -> None:
    with pytest.raises(EngineDead):
        await look_at(engine)


async def test_when_the_engine_is_shut_down_who_asks_is_answered_or_told(where: Where) -> None:
    engines: list[Serving] = []
    num_answers = 0

    async def ask_on() -> None:
        nonlocal num_answers
        with pytest.raises(EngineDead):  # noqa: PT012
            while True:
                await look_at(engines[0])
                num_answers += 1

    async with anyio.create_task_group() as tasks, serving(where) as engine:
        engines.append(engine)
        for _ in range(3):
            tasks.start_soon(ask_on)
        await until(lambda: num_answers > 10)
    assert not engine.client._queries._open


async def test_an_engine_that_hangs_is_killed_and_who_has_asked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transport.process_client.END_SECONDS", 0.2)
    hang = tmp_path / "hang"
    async with anyio.create_task_group() as tasks, serving("process", hang_while=str(hang)) as engine:
        await until(lambda: engine.client.is_asleep)
        hang.touch()
        async with engine.llm.stream(make_request([1, 2], max_tokens=3)):
            await until(lambda: not engine.client.is_asleep)
        tasks.start_soon(_expect_dead, engine)
        await until(lambda: engine.client._queries._open)


async def test_while_nobody_is_there_who_asks_is_told(where: Where) -> None:
    alone = client(where, load_seconds=0.1)
    with pytest.raises(EngineDead, match="no engine is running"):
        await alone.query(GetSnapshot())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ask_while_it_loads, alone)
        async with serving(alone) as engine:
            await look_at(engine)
    with pytest.raises(EngineDead):
        await alone.query(GetSnapshot())


async def _ask_while_it_loads(alone: EngineClient) -> None:
    with pytest.raises(EngineDead, match="no engine is running"):
        await alone.query(GetSnapshot())


class Absent(EngineCore):
    def snapshot(self, asked: GetSnapshot = EVERYTHING) -> EngineSnapshot:
        raise ZeroDivisionError("a bug in what looks")


async def test_a_question_that_cannot_be_answered_ends_nothing_else() -> None:
    async with running(Absent) as engine:
        async with engine.llm.stream(make_request(range(9), max_tokens=20)) as stream:
            with pytest.raises(RequestFailed, match="ZeroDivisionError"):
                await look_at(engine)
            assert sum(len(output.token_ids) for output in await collect(stream)) == 20
        await engine.assert_nothing_left()


# --- several engines


async def test_each_of_several_engines_answers_and_one_that_dies_is_left_out() -> None:
    parallel = replicas(2, step_seconds=0.003)
    async with serving(parallel) as both:
        async with both.llm.stream(make_request([1], max_tokens=100), make_request([2], max_tokens=100)) as stream:
            answers = await both.llm.query(GetSnapshot())
            assert list(answers) == [0, 1]
            assert [len(state.running) + len(state.waiting) for state in answers.values()] == [1, 1]
            assert {each.request_id for state in answers.values() for each in state.running + state.waiting} == set(
                stream.child_ids
            )
            os.kill(process_of(parallel, 0), signal.SIGSTOP)
            found: list[Any] = []

            async def ask() -> None:
                found.append(await both.llm.query(GetSnapshot()))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await until(lambda: parallel.replicas[0].client._queries._open)
                os.kill(process_of(parallel, 0), signal.SIGKILL)
            assert [list(answers) for answers in found] == [[1]]
        await until(lambda: len(parallel._alive()) == 2)
        assert list(await both.llm.query(GetSnapshot())) == [0, 1]
    with pytest.raises(EngineDead):
        await both.llm.query(GetSnapshot())


# --- what a snapshot tells


async def test_a_snapshot_tells_of_requests_blocks_and_steps_what_is_so() -> None:
    core = make_core(num_blocks=34, max_num_seqs=3, max_num_batched_tokens=16)
    for number, priority in enumerate((0, 0, 1, 1)):
        tenant = "a" if number < 2 else "b"
        core.add(make_request(range(30), f"r{number}", priority=priority, tenant=tenant, max_tokens=60))
    seen: set[str] = set()
    while core.has_work:
        state = core.snapshot()
        shown = {request.request_id: request for request in state.running + state.waiting}
        assert shown.keys() == core.scheduler.requests.keys()
        assert [each.request_id for each in state.running] == list(core.scheduler.running)
        assert [each.request_id for each in state.waiting] == [each.request_id for each in core.scheduler.waiting]
        for request_id, request in core.scheduler.requests.items():
            each = shown[request_id]
            seen.add(each.status)
            assert each.status == request.status.name.lower()
            assert (each.tenant, each.priority) == (request.tenant, request.message.priority)
            assert (each.num_prompt_tokens, each.num_output_tokens) == (30, request.num_output_tokens)
            assert each.num_computed_tokens == request.num_computed_tokens
            assert (each.num_blocks, each.num_preemptions) == (len(request.block_ids), request.num_preemptions)
        blocks, pool = state.blocks, core.scheduler.kv.pool
        assert blocks.num_owned + blocks.num_cached + blocks.num_free == 34
        assert blocks.num_cached + blocks.num_free == pool.num_free
        owners = [block_id for request in core.scheduler.requests.values() for block_id in request.block_ids]
        assert sum(count * number for count, number in blocks.by_ref_count.items()) == len(owners)
        assert sum(blocks.by_ref_count.values()) == len(set(owners)) == blocks.num_owned
        core.step()
    assert seen == {"waiting", "running", "preempted"}
    assert core.snapshot().blocks.num_cached == core.scheduler.kv.pool.num_cached > 0

    steps = core.snapshot().steps
    plans = simulated(core).plans[-128:]
    assert len(steps) == 128 < core.num_steps
    assert [step.step for step in steps] == [plan.step for plan in plans]
    for step, plan in zip(steps, plans, strict=True):
        assert step.num_requests == len(plan.request_ids)
        assert step.num_prefill_tokens + step.num_decode_tokens == plan.total_num_scheduled_tokens
        assert step.num_decode_tokens == sum(
            number
            for number, sampled in zip(plan.num_scheduled_tokens, plan.num_sampled_tokens, strict=True)
            if number == sampled
        )
        assert step.outcome is StepOutcome.DONE
        assert step.seconds >= 0
        assert 0 < step.prefill_budget <= 16


async def test_a_snapshot_tells_which_steps_failed_and_which_were_abandoned() -> None:
    def go_wrong(plan: SchedulerOutput) -> None:
        if plan.step == 2:
            raise StepAbandoned("nobody waits")
        if plan.step == 4:
            raise ZeroDivisionError

    core = make_core(before_step=go_wrong)
    core.add(make_request(range(9), max_tokens=8))
    while core.has_work:
        core.step()
    outcomes = {step.step: step.outcome for step in core.snapshot().steps}
    assert outcomes.pop(2) is StepOutcome.ABANDONED
    assert outcomes.pop(4) is StepOutcome.FAILED
    assert set(outcomes.values()) == {StepOutcome.DONE}
