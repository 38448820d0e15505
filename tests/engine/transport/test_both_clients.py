"""What an engine promises its front end, wherever it runs: in a thread, in a process, and on another machine."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import anyio
import pytest

from engine.commands import FinishRequests
from engine.errors import ConfigError, EngineDead, EngineNotReady, InvalidRequest, RequestFailed
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.output_processor import _Choice
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestOutput
from tests.engine.helpers import make_request, until
from tests.engine.processes import Serving, Where, client, engines_of_this_process, serving
from tests.engine.serving import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, assert_text_of, collect, expected_tokens
from tests.selection import slow_except

pytestmark = [pytest.mark.anyio, pytest.mark.seconds]


LOOPS: dict[str, tuple[str, dict[str, bool]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
PLACES = list(itertools.product(("thread", "process"), LOOPS))
QUICK = ("thread uvloop", "process uvloop", "process trio")


@pytest.fixture(params=slow_except([f"{where} {loop}" for where, loop in PLACES], *QUICK))
def place(request: pytest.FixtureRequest) -> tuple[Where, str]:
    return tuple(request.param.split())


@pytest.fixture
def where(place: tuple[Where, str]) -> Where:
    return place[0]


@pytest.fixture
def anyio_backend(place: tuple[Where, str]) -> tuple[str, dict[str, bool]]:
    return LOOPS[place[1]]


async def test_everything_that_is_asked_for_arrives_once_and_in_order(where: Where) -> None:
    async with serving(where) as engine:
        request = make_request(range(40), max_tokens=60, logprobs=1)
        async with engine.llm.stream(request) as stream:
            outputs = await collect(stream)
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        assert token_ids == expected_tokens(request)
        assert_text_of("".join(output.text for output in outputs), token_ids)
        assert [entry.token_id for output in outputs for entry in output.logprobs or []] == token_ids
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (40, 60)
        await engine.assert_nothing_left()


async def test_streams_side_by_side_each_get_their_own_and_are_accounted_for_once(where: Where) -> None:
    async with serving(where, max_num_seqs=4, num_blocks=40) as engine:
        requests = [make_request(range(i, i + 20), max_tokens=30) for i in range(12)]
        got: dict[str, list[int]] = {}

        async def run(request: EngineCoreRequest) -> None:
            got[request.request_id] = await engine.read(request)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(run, request)
        assert got == {request.request_id: expected_tokens(request) for request in requests}
        assert [finished.output_tokens for finished in engine.observer.finished] == [30] * 12
        assert engine.observer.generated_tokens == 12 * 30
        await engine.assert_nothing_left()


async def test_every_field_of_a_request_gets_there(where: Where) -> None:
    async with serving(where) as engine:
        plain = make_request(range(9), max_tokens=40)
        expected = expected_tokens(plain)
        stop = make_request(range(9), max_tokens=40, stop_token_ids=(expected[5],))
        async with engine.llm.stream(stop) as stream:
            outputs = await collect(stream)
        assert outputs[-1].stop_reason == expected[5]
        assert outputs[-1].finish_reason is FinishReason.STOP
        seeded = make_request(
            range(9), max_tokens=20, temperature=1.0, seed=2**63 - 1, logit_bias={3: 0.5}, stop=("never\u2028",)
        )
        assert await engine.read(seeded) == expected_tokens(seeded)
        late = make_request(range(9), max_tokens=20)
        late.deadline = time.monotonic() - 1
        async with engine.llm.stream(late) as stream:
            (output,) = await collect(stream)
        assert output.finish_reason is FinishReason.TIMEOUT
        await engine.assert_nothing_left()


async def test_a_stop_string_that_the_front_end_finds_ends_the_request_in_the_engine(where: Where) -> None:
    async with serving(where) as engine:
        request = make_request(range(10), max_tokens=80)
        async with engine.llm.stream(request) as stream:
            text = "".join([output.text async for output in stream])
        stopped = make_request(range(10), max_tokens=80, stop=(text[20:23],))
        async with engine.llm.stream(stopped) as stream:
            outputs = await collect(stream)
        assert "".join(output.text for output in outputs) == text[: text.index(text[20:23])]
        assert outputs[-1].finish_reason is FinishReason.STOP
        await engine.assert_nothing_left()


async def test_an_invalid_request_is_refused_before_anything_is_sent(where: Where) -> None:
    async with serving(where) as engine:
        with pytest.raises(InvalidRequest, match="not in the vocabulary"):
            async with engine.llm.stream(make_request([1, 2]), make_request([1, VOCAB_SIZE])):
                pass
        with pytest.raises(InvalidRequest, match="maximum context length is 128"):
            await engine.read(make_request([1] * MAX_MODEL_LEN))
        assert engine.llm.last_stats is None


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
async def test_client_gone_frees_everything_that_the_request_held(where: Where, phase: str) -> None:
    async with serving(where, max_num_seqs=1, max_num_batched_tokens=8, step_seconds=0.005) as engine:
        async with anyio.create_task_group() as tasks:
            if phase == "queued":
                tasks.start_soon(engine.read, make_request([1], max_tokens=60))
                await until(lambda: engine.llm.last_stats)
            async with engine.llm.stream(make_request(range(60), "gone")) as stream:
                if phase == "decoding":
                    assert (await anext(stream)).token_ids
                else:
                    await until(lambda: engine.llm.last_stats)
            assert FinishReason.ABORT in [finished.reason for finished in engine.observer.finished]
        await engine.assert_nothing_left()


async def test_a_cancelled_scope_aborts_what_it_opened(where: Where) -> None:
    async with serving(where, step_seconds=0.005) as engine:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with engine.llm.stream(make_request([1, 2], "gone")) as stream:
                await collect(stream)
        assert engine.llm.num_open_choices == 0
        assert await engine.read(make_request([3], max_tokens=1))
        await engine.assert_nothing_left()


async def test_ends_that_overtake_repeat_or_come_late_leave_nothing_behind(where: Where) -> None:
    async with serving(where) as engine:
        engine.client.send(FinishRequests(["early-0"], FinishReason.ABORT))
        engine.client.send(FinishRequests(["early-0"], FinishReason.ABORT))
        request = make_request(range(9), "early", max_tokens=5)
        async with engine.llm.stream(request) as stream:
            token_ids = [token_id async for output in stream for token_id in output.token_ids]
        assert token_ids == expected_tokens(request)
        engine.client.send(FinishRequests(stream.child_ids, FinishReason.STOP))
        await engine.assert_nothing_left()


async def test_while_the_model_loads_streams_are_refused(where: Where) -> None:
    llm = AsyncLLM(client(where, load_seconds=0.2), TOKENIZER)
    async with llm.running():
        assert not llm.is_available
        with pytest.raises(EngineNotReady):
            async with llm.stream(make_request([1])):
                pass
        ready = await llm.wait_ready()
        assert (ready.vocab_size, ready.num_blocks, ready.block_size) == (VOCAB_SIZE, 64, 4)
        assert llm.is_available


async def test_a_mistake_of_the_operators_arrives_as_what_it_is(where: Where) -> None:
    llm = AsyncLLM(client(where, loading="config"), TOKENIZER)
    async with llm.running():
        with pytest.raises(ConfigError, match="max_model_len is 9: it must be 8. max_model_len=8 works") as refused:
            await llm.wait_ready()
        assert refused.value.__cause__ is None, "there is nothing else to look into"
        assert not llm.is_available


async def test_what_loading_failed_with_is_told_to_who_waits_and_who_comes_later(where: Where) -> None:
    llm = AsyncLLM(client(where, loading="missing"), TOKENIZER)
    async with llm.running():
        with pytest.raises((FileNotFoundError, EngineDead), match="no model there"):
            await llm.wait_ready()
        with pytest.raises(EngineDead):
            async with llm.stream(make_request([1])):
                pass
        assert llm.ready is None


@pytest.mark.slow
@pytest.mark.parametrize("panic", [False, True])
async def test_when_the_engine_dies_open_streams_and_later_ones_say_so(where: Where, panic: bool) -> None:
    async with serving(where, last_step=3, panic=panic) as engine:
        received: list[int] = []
        with pytest.raises(EngineDead) as dead:  # noqa: PT012
            async with engine.llm.stream(make_request(range(9), n=2)) as stream:
                async for output in stream:
                    received += output.token_ids
        assert ("a panic" if panic else "a bug in the engine") in str(dead.value.__cause__)
        assert received, "what came before it died was delivered"
        with pytest.raises(EngineDead):
            await engine.read(make_request([1]))
        assert await engine.llm.wait_dead() is dead.value.__cause__
        assert [finished.reason for finished in engine.observer.finished] == [FinishReason.ERROR]


@pytest.mark.parametrize("stage", ["decode", "listen"])
async def test_a_step_that_cannot_be_delivered_fails_its_own_stream_alone(
    where: Where, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _Choice.process

    def fail_once(choice: _Choice, output: EngineCoreOutput, timestamp: float) -> bool:
        if choice.stream.request_id == "unlucky" and choice.num_output_tokens == 5:
            raise LookupError("no such token")
        return process(choice, output, timestamp)

    def listener(outputs: Collection[RequestOutput]) -> bool:
        if any(output.num_output_tokens > 5 for output in outputs):
            raise LookupError("no such listener")
        return False

    async with serving(where, max_num_seqs=8, num_blocks=128) as engine:
        requests = [make_request(range(i, i + 20), max_tokens=40) for i in range(5)]
        unlucky = make_request(range(9), "unlucky", max_tokens=100, n=2)
        got: dict[str, list[int]] = {}

        async def run(request: EngineCoreRequest) -> None:
            got[request.request_id] = await engine.read(request)

        if stage == "decode":
            monkeypatch.setattr(_Choice, "process", fail_once)
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(run, request)
            async with engine.llm.stream(unlucky) as stream:
                if stage == "listen":
                    stream.listen(listener)
                with pytest.raises(RequestFailed, match=r"could not be delivered \(LookupError\)"):
                    await collect(stream)
        assert got == {request.request_id: expected_tokens(request) for request in requests}
        assert Counter(finished.reason for finished in engine.observer.finished) == {
            FinishReason.LENGTH: 5,
            FinishReason.ERROR: 1,
        }
        await engine.assert_nothing_left()


async def test_where_nobody_knows_whose_step_is_lost_the_engine_counts_as_dead(
    where: Where, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(where) as engine:

        def fail(*args: object) -> None:
            raise LookupError

        with pytest.raises(EngineDead):  # noqa: PT012
            async with engine.llm.stream(make_request(range(9), max_tokens=100)) as stream:
                async for _ in stream:
                    monkeypatch.setattr(engine.observer, "on_step", fail)
        assert "could not be delivered (LookupError)" in str(await engine.llm.wait_dead())
        assert "could not be delivered; stopping the engine" in caplog.text
        with pytest.raises(EngineDead):
            await engine.read(make_request(range(9)))


async def test_streams_still_open_when_the_engine_is_shut_down_get_engine_dead(where: Where) -> None:
    errors: list[BaseException | None] = []

    async def read(engine: Serving, opened: anyio.Event) -> None:
        try:
            async with engine.llm.stream(make_request(range(9), max_tokens=100)) as stream:
                opened.set()
                await collect(stream)
        except EngineDead as error:
            errors.append(error.__cause__)

    async with anyio.create_task_group() as tasks, serving(where, step_seconds=0.005) as engine:
        opened = anyio.Event()
        tasks.start_soon(read, engine, opened)
        await opened.wait()
    assert [str(error) for error in errors] == ["the engine has been shut down"]


@pytest.mark.parametrize("how", ["left", "cancelled", "failed", "cancelled while it loads"])
async def test_nothing_outlives_the_scope(
    where: Where, how: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    threads = threads_of_its_own()
    with anyio.CancelScope() as scope:
        try:
            if how == "cancelled while it loads":
                llm = AsyncLLM(client(where, load_seconds=0.3), TOKENIZER)
                async with llm.running():
                    scope.cancel()
                    await llm.wait_ready()
            async with serving(where) as engine:
                await engine.read(make_request(range(9), max_tokens=5))
                if where == "process":
                    assert len(engines_of_this_process()) == 1
                    assert os.listdir(short_path)
                if how == "cancelled":
                    scope.cancel()
                    await anyio.sleep_forever()
                if how == "failed":
                    raise ZeroDivisionError
        except* ZeroDivisionError:
            assert how == "failed"
    assert scope.cancelled_caught == how.startswith("cancelled")
    assert not engines_of_this_process()
    assert not os.listdir(short_path)
    assert threads_of_its_own() <= threads


def threads_of_its_own() -> set[str]:
    """All threads by name, but for the idle workers that a loop keeps for their next user."""
    return {t.name for t in threading.enumerate() if not t.name.startswith(("AnyIO worker", "Trio thread"))}


async def test_the_heartbeat_says_whether_there_is_work_and_when_it_got_on(where: Where, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    async with serving(where, hang_while=str(hang)) as engine:
        await until(lambda: engine.client.is_asleep)
        assert engine.llm.seconds_without_progress() == 0.0
        hang.touch()
        before = time.monotonic()
        async with engine.llm.stream(make_request([1, 2], max_tokens=3)):
            await until(lambda: not engine.client.is_asleep)
            await until(lambda: engine.llm.seconds_without_progress() > 0.1)
        assert engine.llm.seconds_without_progress() > 0.1, "that its client has left does not make it well"
        assert engine.client.last_progress < before + 5.0
        hang.unlink()
        await until(lambda: engine.client.is_asleep)
        assert engine.llm.seconds_without_progress() == 0.0
