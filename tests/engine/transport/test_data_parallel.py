"""Several engines that look like one, and of which each may die alone."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import pytest

import engine.routing.router
import engine.transport.data_parallel
from engine.commands import AddRequests, Event, FinishRequests, ResetPrefixCache
from engine.errors import ConfigError, EngineDead, EngineNotReady
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason, RequestOutput
from engine.transport.data_parallel import DataParallelClient, Replica
from tests.engine.helpers import make_request, until
from tests.engine.processes import engines_of_this_process, process_client, process_of, replicas, serving
from tests.engine.serving import TOKENIZER, VOCAB_SIZE, collect, expected_tokens
from tests.selection import slow_except

pytestmark = [pytest.mark.anyio, pytest.mark.seconds]


@pytest.fixture(params=slow_except(["uvloop", "trio"], "uvloop"))
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """What is particular to an event loop is in ProcessClient, whose tests run on all of them."""
    return ("trio", {}) if request.param == "trio" else ("asyncio", {"use_uvloop": True})


async def test_several_engines_measure_and_count_as_one() -> None:
    parallel = replicas(2, step_seconds=0.015)
    async with serving(parallel) as both:
        assert both.llm.ready is not None
        assert both.llm.ready.num_blocks == 2 * 64
        requests = [make_request(range(i, i + 20), max_tokens=30) for i in range(6)]
        got: dict[str, list[int]] = {}

        async def run(request: EngineCoreRequest) -> None:
            got[request.request_id] = await both.read(request)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(run, request)
            await until(lambda: both.llm.last_stats and both.llm.last_stats.num_running == 6)
            assert {len(replica.requests) for replica in parallel.replicas} == {3}
        assert got == {request.request_id: expected_tokens(request) for request in requests}
        await both.assert_nothing_left()
        stats = both.observer.stats
        assert [each.step for each in stats] == list(range(1, len(stats) + 1))
        assert 0.25 < max(each.kv_cache_usage for each in stats) <= 6 * 13 / 128, "of the blocks of both"
        assert sum(each.prompt_tokens for each in stats) == 6 * 20
        assert both.observer.generated_tokens == 6 * 30
        assert parallel._router.loads == [0.0, 0.0]
        assert not parallel._placed


@pytest.mark.slow
async def test_choices_of_one_prompt_run_where_they_share_it() -> None:
    parallel = replicas(2, step_seconds=0.01)
    async with serving(parallel) as both:
        async with both.llm.stream(
            make_request(range(17), n=3, max_tokens=40), make_request(range(50, 67), n=3, max_tokens=40)
        ) as stream:
            await anext(stream)
            assert [len(replica.requests) for replica in parallel.replicas] == [3, 3]
            await collect(stream)
        hits = sum(each.prefix_cache_hits for each in both.observer.stats)
        assert hits == 2 * 2 * 16
        await both.assert_nothing_left()


async def test_leaving_ends_a_request_where_it_runs() -> None:
    parallel = replicas(2, step_seconds=0.003)
    async with serving(parallel) as both:
        async with both.llm.stream(make_request(range(9), max_tokens=100), make_request([1], max_tokens=100)) as stream:
            await anext(stream)
        await both.assert_nothing_left()
        assert not parallel._placed
        assert parallel._router.loads == [0.0, 0.0]


@pytest.mark.slow
async def test_a_replica_that_dies_takes_its_own_requests_with_it_and_comes_back() -> None:
    parallel = replicas(2, step_seconds=0.01)
    async with serving(parallel) as both:
        last: dict[int, RequestOutput] = {}
        tokens: dict[int, list[int]] = {}
        requests = [make_request(range(i, i + 9), max_tokens=100) for i in range(6)]

        async def run(i: int) -> None:
            async with both.llm.stream(requests[i]) as stream:
                async for output in stream:
                    tokens.setdefault(i, []).extend(output.token_ids)
                    last[i] = output

        async with anyio.create_task_group() as tasks:
            for i in range(6):
                tasks.start_soon(run, i)
            await until(lambda: len(tokens) == 6)
            first = process_of(parallel, 0)
            os.kill(first, signal.SIGKILL)
        failed = {i for i, output in last.items() if output.finish_reason is FinishReason.ERROR}
        assert len(failed) == 3
        assert {last[i].error for i in failed} == {"the engine that ran this request has died"}
        for i in set(range(6)) - failed:
            assert tokens[i] == expected_tokens(requests[i])
        assert both.llm.is_available
        assert await both.read(requests[0]) == expected_tokens(requests[0])

        await until(lambda: len(parallel._alive()) == 2)
        assert process_of(parallel, 0) != first
        async with both.llm.stream(*(make_request([i], max_tokens=40) for i in range(4))) as stream:
            await anext(stream)
            assert all(replica.requests for replica in parallel.replicas)
            await collect(stream)
        await both.assert_nothing_left()
        assert both.llm.error is None


@pytest.mark.slow
async def test_a_request_that_kills_its_engine_is_the_end_of_one_and_who_waited_there_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.transport.data_parallel, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(engine.transport.data_parallel, "MAX_DEATHS", 1)
    poison = VOCAB_SIZE - 1
    parallel = replicas(2, max_num_seqs=1, step_seconds=0.01, poison=poison)
    async with serving(parallel) as both:
        for number in range(3):
            await until(lambda: len(parallel._alive()) == 2)
            others = [make_request([i, *range(9)], max_tokens=20) for i in range(4)]
            got: dict[str, list[int]] = {}

            async def run(request: EngineCoreRequest, got: dict[str, list[int]]) -> None:
                got[request.request_id] = await both.read(request)

            async with anyio.create_task_group() as tasks, both.llm.stream(make_request([poison])) as stream:
                for request in others:
                    tasks.start_soon(run, request, got)
                assert [each.finish_reason async for each in stream] == [FinishReason.ERROR]
            assert got == {request.request_id: expected_tokens(request) for request in others}
            assert sum(replica.num_starts for replica in parallel.replicas) <= 2 + number + 1
        assert 1 <= parallel.num_placed_again <= 3 * 3
        await both.assert_nothing_left()


async def test_a_tenants_limit_holds_over_all_engines() -> None:
    parallel = replicas(2, step_seconds=0.003)
    async with serving(parallel) as both:
        requests = [
            msgspec.structs.replace(make_request([i, *range(9)], tenant="a", max_tokens=9), tenant_max_running=2)
            for i in range(7)
        ]
        got: dict[int, list[int]] = {}

        async def run(i: int) -> None:
            got[i] = await both.read(requests[i])

        async with anyio.create_task_group() as tasks:
            for i in range(7):
                tasks.start_soon(run, i)
            tasks.start_soon(both.read, make_request(range(9), tenant="b", max_tokens=60))
            with anyio.move_on_after(0.05):  # one leaves that may be held back
                await both.read(
                    msgspec.structs.replace(make_request([1], tenant="a", max_tokens=99), tenant_max_running=2)
                )
        assert got == {i: expected_tokens(request) for i, request in enumerate(requests)}
        most = max(each.num_running for each in both.observer.stats)
        assert 2 <= most <= 4, "two of one tenant, one of the other, and who left may run while the next begins"
        assert not parallel._limits.num_held
        await both.assert_nothing_left()


async def test_what_is_held_back_ends_in_time_though_no_engine_makes_a_step(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    parallel = replicas(2, step_seconds=0.02, hang_while=str(hang))
    async with serving(parallel) as both:
        long, late = (
            msgspec.structs.replace(make_request([i], tenant="a", max_tokens=90), tenant_max_running=1)
            for i in range(2)
        )
        late.first_token_deadline = time.monotonic() + 0.1
        async with both.llm.stream(long) as first, both.llm.stream(late) as second:
            await anext(first)
            hang.touch()
            assert [each.finish_reason async for each in second] == [FinishReason.TIMEOUT]
            hang.unlink()
        await both.assert_nothing_left()


@pytest.mark.slow
async def test_while_no_replica_lives_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transport.data_parallel, "RESTART_SECONDS", 0.2)
    parallel = replicas(2)
    async with serving(parallel) as both:
        for index in range(2):
            os.kill(process_of(parallel, index), signal.SIGKILL)
        await until(lambda: not both.llm.is_available)
        with pytest.raises(EngineNotReady):
            await both.read(make_request([1]))
        # A request of many prompts gives others their turn between them, and the engines may die meanwhile.
        late = make_request([2], max_tokens=90)
        parallel.send(AddRequests.of([late]))
        await until(lambda: both.llm.is_available)
        assert await both.read(make_request([1], max_tokens=3))
        await until(lambda: late.request_id in parallel._placed)
        parallel.send(FinishRequests([late.request_id], FinishReason.ABORT))
        await both.assert_nothing_left()


@pytest.mark.slow
async def test_one_that_dies_again_and_again_harms_nobody_and_all_of_them_are_a_dead_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.transport.data_parallel, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(engine.transport.data_parallel, "MAX_DEATHS", 1)
    parallel = replicas(2)
    async with serving(parallel) as both:

        async def kill(index: int) -> None:
            replica = parallel.replicas[index]
            await until(lambda: replica.engine_info is not None or both.llm.error)
            num_deaths = replica.num_deaths
            os.kill(process_of(parallel, index), signal.SIGKILL)
            await until(lambda: replica.num_deaths > num_deaths)

        for _ in range(3):
            await kill(0)
        assert await both.read(make_request([1], max_tokens=3)), "the other one lives"
        await kill(1)
        assert both.llm.error is None, "it had served somebody"

        def are_dead() -> bool:
            for index in parallel._alive():
                with suppress(ProcessLookupError):  # it is about to be missed
                    os.kill(process_of(parallel, index), signal.SIGKILL)
            return both.llm.error is not None

        await until(are_dead)
        assert "killed by SIGKILL" in str(await both.llm.wait_dead())
        with pytest.raises(EngineDead):
            await both.read(make_request([1]))
        await until(lambda: not engines_of_this_process())


async def test_one_that_cannot_be_started_again_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transport.data_parallel, "RESTART_SECONDS", 0.01)
    parallel = replicas(2)
    async with serving(parallel) as both:
        with monkeypatch.context() as full:
            full.setattr(tempfile, "tempdir", "/nowhere")  # as good as a full disk
            os.kill(process_of(parallel, 0), signal.SIGKILL)
            await until(lambda: parallel.replicas[0].num_deaths == 3)
            request = make_request(range(9), max_tokens=9)
            assert await both.read(request) == expected_tokens(request)
        await until(lambda: len(parallel._alive()) == 2)
        await both.assert_nothing_left()


async def test_a_death_while_starting_is_the_end() -> None:
    llm = AsyncLLM(replicas(2, loading="config"), TOKENIZER)
    async with llm.running():
        with pytest.raises(ConfigError, match="max_model_len=8 works"):
            await llm.wait_ready()
    assert not engines_of_this_process()


@pytest.mark.parametrize("how", ["left", "cancelled"])
async def test_no_replica_outlives_the_scope(how: str) -> None:
    with anyio.CancelScope() as scope:
        async with serving(replicas(2)) as both:
            assert len(engines_of_this_process()) == 2
            if how == "cancelled":
                scope.cancel()
                await anyio.sleep_forever()
    assert str(both.llm.error) == "the engine has been shut down"
    assert not engines_of_this_process()


async def test_one_hung_replica_is_seen_beside_one_that_is_busy(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    parallel = replicas(2, hang_while=str(hang), step_seconds=0.01)
    async with serving(parallel) as both:
        await until(lambda: parallel.is_asleep)
        assert both.llm.seconds_without_progress() == 0.0
        os.kill(process_of(parallel, 0), signal.SIGSTOP)
        try:
            first, second = make_request([1], max_tokens=100), make_request([2], max_tokens=100)
            async with both.llm.stream(first, second) as stream:
                assert {(await anext(stream)).index for _ in range(5)} == {1}
                await until(lambda: both.llm.seconds_without_progress() > 0.1)
        finally:
            os.kill(process_of(parallel, 0), signal.SIGCONT)
        await both.assert_nothing_left()
        assert both.llm.seconds_without_progress() == 0.0


@pytest.mark.slow
async def test_a_replica_whose_heartbeat_stands_still_counts_as_dead_and_is_started_again(tmp_path: Path) -> None:
    """The reason does not matter, nor whether there is another engine."""
    hangs = [tmp_path / str(index) for index in range(2)]
    parallel = DataParallelClient(
        lambda index: process_client(hang_while=str(hangs[index]), step_seconds=0.01), 2, 8, stall_limit=0.5
    )
    async with serving(parallel) as both:
        await until(lambda: parallel.is_asleep)
        hangs[0].touch()
        requests = [make_request([number], max_tokens=100) for number in range(4)]

        async def run(request: EngineCoreRequest) -> None:
            assert await both.read(request) == expected_tokens(request)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for request in requests:
                    tasks.start_soon(run, request)
        assert parallel.num_placed_again == 2, "none of them had begun there"
        hangs[0].unlink()
        await until(lambda: len(parallel._alive()) == 2)
        assert parallel.replicas[1].num_deaths == 0
        await both.assert_nothing_left()


async def test_engines_follow_the_queue_and_the_one_with_least_to_do_goes_and_ends_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine.transport.data_parallel, "SIZING_SECONDS", 0.02)
    monkeypatch.setattr(engine.routing.router, "UPSCALE_SECONDS", 0.1)
    monkeypatch.setattr(engine.routing.router, "DOWNSCALE_SECONDS", 0.3)
    hang = tmp_path / "hang"
    hang.touch()
    parallel = DataParallelClient(lambda index: process_client(hang_while=str(hang)), 1, 8, max_size=2)
    async with serving(parallel) as fleet, anyio.create_task_group() as tasks:
        short, long = (make_request(range(30, 40), max_tokens=max_tokens) for max_tokens in (20, 90))
        got: dict[str, list[int]] = {}

        async def run(request: EngineCoreRequest) -> None:
            got[request.request_id] = await fleet.read(request)

        async with anyio.create_task_group() as crowd:
            tasks.start_soon(run, short)
            await until(lambda: parallel.replicas[0].requests)
            for i in range(12):
                crowd.start_soon(fleet.read, make_request([i, *range(9)], max_tokens=100))
            await until(lambda: fleet.llm.num_engines == 2)
            assert fleet.llm.num_blocks == 2 * 64
            tasks.start_soon(run, long)
            await until(lambda: parallel.replicas[1].requests)
            crowd.cancel_scope.cancel()
        await until(lambda: fleet.llm.num_engines == 1)
        assert len(engines_of_this_process()) == 2, "it gets nothing new, and ends what it has"
        hang.unlink()
        await until(lambda: len(engines_of_this_process()) == 1)
        assert parallel._alive() == [1]
        await until(lambda: len(got) == 2)
        assert got == {request.request_id: expected_tokens(request) for request in (short, long)}
        assert not any(replica.num_deaths for replica in parallel.replicas)
        assert len(await fleet.read(make_request(range(9), max_tokens=5))) == 5
        assert fleet.llm.num_blocks == 64


@pytest.mark.slow
async def test_what_is_lost_of_what_is_cached_is_missed_though_nothing_comes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clear, a prompt, a restart: after each of them what is believed is what is there, as an engine says that is
    asked for everything."""
    parallel = replicas(2, max_model_len=512, num_blocks=512, max_num_batched_tokens=512)
    index, take = parallel._router.index, parallel._take
    lost: list[EngineCoreOutputs] = []
    loses = False

    def lossy(replica: Replica, event: Event) -> list[Event]:
        if loses and isinstance(event, EngineCoreOutputs) and event.kv_events is not None:
            lost.append(event)
            event.kv_events = None
        return take(replica, event)

    monkeypatch.setattr(parallel, "_take", lossy)
    async with serving(parallel) as both:

        def believed() -> list[int]:
            return [len(index._chunks.get(each, ())) for each in range(2)]

        async def prefill(first: int) -> None:
            for i in range(8):
                await both.read(make_request([first, i, *[9] * 270], max_tokens=1))

        await until(lambda: index.publishes(0) and index.publishes(1))
        await prefill(0)
        await until(lambda: sum(believed()) == 8 * 2)
        for number in range(1, 3):
            loses = True
            parallel.send(ResetPrefixCache())
            await until(lambda: len(lost) >= 2)
            loses = False
            await until(lambda: sum(believed()) == 0)

            loses = True
            await prefill(number)
            loses = False
            await until(lambda: sum(believed()) == 8 * 2)
            lost.clear()
        os.kill(process_of(parallel, 0), signal.SIGKILL)
        await until(lambda: believed()[0] == 0)
        await until(lambda: len(parallel._alive()) == 2 and index.publishes(0))
        assert believed()[0] == 0
        assert believed()[1] > 0
        assert index.num_gaps >= 4
