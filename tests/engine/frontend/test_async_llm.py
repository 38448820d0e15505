"""A request is a scope: what AsyncLLM promises to whoever opens a stream, and what it leaves behind: nothing."""

from __future__ import annotations

import threading
import time

import anyio
import pytest

from engine.commands import FinishRequests
from engine.core.core import EngineCore
from engine.errors import EngineNotReady, InvalidRequest
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.transport.client import ThreadClient
from tests.engine.helpers import (
    make_core,
    make_request,
    until,
)
from tests.engine.serving import (
    TOKENIZER,
    VOCAB_SIZE,
    assert_text_of,
    collect,
    expected_tokens,
    read_one,
    running,
)

pytestmark = pytest.mark.anyio


# --- streams


async def test_deltas_add_up_to_the_whole_answer() -> None:
    async with running() as engine:
        request = make_request(range(40), max_tokens=60)
        async with engine.llm.stream(request) as stream:
            outputs = await collect(stream)
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        assert token_ids == expected_tokens(request)
        assert_text_of("".join(output.text for output in outputs), token_ids)
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (40, 60)
        await engine.assert_nothing_left()


async def test_streams_side_by_side_each_get_their_own_tokens() -> None:
    async with running(max_num_seqs=4, num_blocks=40) as engine:
        requests = [make_request(range(i, i + 20), max_tokens=30) for i in range(12)]
        got: dict[str, list[int]] = {}

        async def run(request: EngineCoreRequest) -> None:
            async with engine.llm.stream(request) as stream:
                got[request.request_id] = [token_id async for output in stream for token_id in output.token_ids]

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(run, request)
        assert got == {request.request_id: expected_tokens(request) for request in requests}
        await engine.assert_nothing_left()


async def test_deltas_of_a_reader_that_lags_arrive_merged() -> None:
    async with running() as engine:
        request = make_request(range(10), max_tokens=50, logprobs=1)
        async with engine.llm.stream(request) as stream:
            await until(lambda: engine.core.num_steps)
            await engine.idle()
            (output,) = await collect(stream)
        assert output.token_ids == expected_tokens(request)
        assert_text_of(output.text, output.token_ids)
        assert [entry.token_id for entry in output.logprobs or []] == output.token_ids
        assert output.finish_reason is FinishReason.LENGTH


async def test_choices_and_prompts_are_numbered_in_one_scope() -> None:
    async with running() as engine:
        prompts = [
            make_request(range(9), "r", n=2, max_tokens=5, temperature=1.0, seed=1),
            make_request(range(20, 25), "r", n=2, max_tokens=5, temperature=1.0, seed=1),
        ]
        async with engine.llm.stream(*prompts) as stream:
            outputs = await collect(stream)
        finished = [output.index for output in outputs if output.finish_reason is not None]
        assert sorted(finished) == [0, 1, 2, 3]
        assert len(engine.observer.finished) == 1
        assert engine.observer.finished[0].prompt_tokens == 14
        assert engine.observer.finished[0].output_tokens == 20
        await engine.assert_nothing_left()


async def test_a_stop_string_ends_the_stream_and_the_request_in_the_engine() -> None:
    async with running() as engine:
        request = make_request(range(10), max_tokens=80)
        text = ""
        async with engine.llm.stream(request) as stream:
            async for output in stream:
                text += output.text
        # Not at the start, and long enough to span tokens.
        stop = text[20:23]
        end = text.index(stop)
        await engine.idle()

        def wait_for_the_loop(plan: SchedulerOutput) -> None:
            while engine.num_steps_told < plan.step - 1:
                time.sleep(0.0005)

        engine.executor.before_step = wait_for_the_loop
        stopped = make_request(range(10), "stopped", max_tokens=80, stop=(stop,))
        async with engine.llm.stream(stopped) as stream:
            outputs = await collect(stream)
        assert "".join(output.text for output in outputs) == text[:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        await engine.idle()
        # One token a step: the engine hears of it before the step after the next one.
        assert len(engine.plans_with("stopped")) <= len(token_ids) + 1 < 80
        assert stop in TOKENIZER.decode(token_ids)
        assert stop not in TOKENIZER.decode(token_ids[:-1])
        assert engine.observer.finished[-1].output_tokens == len(token_ids)
        assert engine.observer.finished[-1].reason is FinishReason.STOP
        await engine.assert_nothing_left()


async def test_a_failed_step_is_told_to_its_streams_and_the_next_request_works() -> None:
    def break_first(plan: SchedulerOutput) -> None:
        if plan.step <= 2:  # once is forgiven
            raise RuntimeError("the device broke")

    async with running(before_step=break_first) as engine:
        request = make_request(range(10), max_tokens=5)
        async with engine.llm.stream(request) as stream:
            (output,) = await collect(stream)
        assert output.finish_reason is FinishReason.ERROR
        assert "RuntimeError" in (output.error or "")
        async with engine.llm.stream(request) as stream:
            outputs = await collect(stream)
        assert [token_id for output in outputs for token_id in output.token_ids] == expected_tokens(request)
        assert [finished.reason for finished in engine.observer.finished] == [FinishReason.ERROR, FinishReason.LENGTH]
        await engine.assert_nothing_left()


# --- refusals


async def test_an_invalid_request_is_refused_before_anything_is_queued() -> None:
    async with running() as engine:
        good, bad = make_request([1, 2]), make_request([1, VOCAB_SIZE])
        with pytest.raises(InvalidRequest, match="not in the vocabulary") as refused:
            async with engine.llm.stream(good, bad):
                pass
        assert refused.value.param == "prompt"
        assert engine.llm.num_open_choices == 0
        assert engine.core.num_steps == 0
        assert not engine.observer.finished


async def test_while_the_model_loads_streams_are_refused() -> None:
    loaded = threading.Event()

    def load() -> EngineCore:
        loaded.wait()
        return make_core(vocab_size=VOCAB_SIZE)

    llm = AsyncLLM(ThreadClient(load), TOKENIZER)
    async with llm.running():
        try:
            with pytest.raises(EngineNotReady):
                async with llm.stream(make_request([1])):
                    pass
        finally:
            loaded.set()
        ready = await llm.wait_ready()
        assert (ready.vocab_size, ready.num_blocks, ready.block_size) == (VOCAB_SIZE, 64, 4)


# --- leaving


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
async def test_client_gone_ends_the_request_within_a_step(phase: str) -> None:
    async with running(max_num_seqs=1, max_num_batched_tokens=8) as engine:
        # 60 tokens at 8 a step: the first is sampled in step 8.
        engine.gate.step = {"queued": 1, "prefilling": 3, "decoding": 12}[phase]
        async with anyio.create_task_group() as tasks:
            if phase == "queued":
                tasks.start_soon(read_one, engine, make_request([1], "other", max_tokens=20))
                await engine.held()
            async with engine.llm.stream(make_request(range(60), "gone")) as stream:
                if phase == "decoding":
                    assert (await anext(stream)).token_ids
                await engine.held()
            assert FinishReason.ABORT in [finished.reason for finished in engine.observer.finished]
            engine.gate.open()
        await engine.assert_nothing_left()
        assert engine.plans_with("gone") == list(range(1, engine.gate.step + 1) if phase != "queued" else [])


async def test_client_cancelled_before_the_first_output_is_aborted() -> None:
    async with running(max_num_batched_tokens=8) as engine:
        engine.gate.step = 1
        with anyio.CancelScope() as scope:
            async with engine.llm.stream(make_request(range(60), "gone")) as stream:
                await engine.held()
                scope.cancel()
                await collect(stream)
        assert scope.cancelled_caught
        await engine.assert_nothing_left()
        assert engine.plans_with("gone") == [1]


async def test_a_scope_cancelled_already_still_aborts_what_it_opened() -> None:
    async with running() as engine:
        engine.gate.step = 1  # so that it cannot finish before the cancellation is delivered
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with engine.llm.stream(make_request([1, 2], "gone")) as stream:
                await collect(stream)
        assert engine.llm.num_open_choices == 0
        engine.gate.open()
        await read_one(engine, make_request([3], max_tokens=1))  # has passed the inbox after the abort
        await engine.assert_nothing_left()
        assert engine.observer.finished[0].reason is FinishReason.ABORT


async def test_a_body_that_never_iterates_aborts_all_the_same() -> None:
    async with running() as engine:
        engine.gate.step = 1
        async with engine.llm.stream(make_request(range(9), "gone")):
            await engine.held()
        await engine.assert_nothing_left()
        assert engine.plans_with("gone") == [1]


async def test_an_error_in_the_body_passes_through_and_aborts() -> None:
    async with running() as engine:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with engine.llm.stream(make_request(range(9))) as stream:
                await anext(stream)
                raise ZeroDivisionError
        await engine.assert_nothing_left()


async def test_leaving_one_scope_ends_all_its_choices_and_nobody_elses() -> None:
    async with running() as engine:
        engine.gate.step = 20
        other = make_request(range(30, 40), "other", max_tokens=60)
        async with engine.llm.stream(other) as others:
            async with engine.llm.stream(make_request(range(9), "gone", n=3)) as stream:
                await anext(stream)
                await engine.held()
                assert engine.llm.num_open_choices == 4
            assert engine.llm.num_open_choices == 1
            engine.gate.open()
            outputs = await collect(others)
        assert [token_id for output in outputs for token_id in output.token_ids] == expected_tokens(other)
        assert engine.plans_with("gone")[-1] == engine.gate.step
        await engine.assert_nothing_left()


async def test_ends_that_overtake_repeat_or_come_late_leave_nothing_behind() -> None:
    async with running() as engine:
        engine.client.send(FinishRequests(["early-0"], FinishReason.ABORT))
        engine.client.send(FinishRequests(["early-0"], FinishReason.ABORT))
        request = make_request(range(9), "early", max_tokens=5)
        async with engine.llm.stream(request) as stream:
            outputs = await collect(stream)
            engine.client.send(FinishRequests(stream.child_ids, FinishReason.ABORT))
            engine.client.send(FinishRequests(stream.child_ids, FinishReason.ABORT))
        assert [token_id for output in outputs for token_id in output.token_ids] == expected_tokens(request)
        engine.client.send(FinishRequests(stream.child_ids, FinishReason.STOP))
        await engine.assert_nothing_left()


async def test_a_request_id_can_be_used_again_at_once() -> None:
    # What the engine still sends for the first one must not reach the second.
    async with running() as engine:
        engine.gate.step = 5
        async with engine.llm.stream(make_request(range(9), "same", max_tokens=50)):
            await engine.held()
        again = make_request(range(50, 59), "same", max_tokens=5)
        async with engine.llm.stream(again) as stream:
            engine.gate.open()
            outputs = await collect(stream)
        assert [token_id for output in outputs for token_id in output.token_ids] == expected_tokens(again)
        await engine.assert_nothing_left()


# --- accounting


async def test_every_request_is_booked_exactly_once_with_its_reason_and_its_tokens() -> None:
    async with running(num_blocks=32, max_num_seqs=3) as engine:
        used: list[tuple[FinishReason, int, int]] = []

        async def use(i: int) -> None:
            request = make_request(range(i, i + 10), max_tokens=5 + i, n=1 + i % 3, temperature=1.0)
            last: dict[int, int] = {}
            async with engine.llm.stream(request) as stream:
                async for output in stream:
                    last[output.index] = output.num_output_tokens
                    if i % 4 == 3:
                        break
            assert stream.finish_reason is not None
            if i % 4 != 3:
                assert sum(last.values()) == (5 + i) * (1 + i % 3)
            used.append((stream.finish_reason, 10, stream.num_output_tokens))

        async with anyio.create_task_group() as tasks:
            for i in range(12):
                tasks.start_soon(use, i)
        await engine.assert_nothing_left()
        observer = engine.observer
        accounted = [
            (finished.reason, finished.prompt_tokens, finished.output_tokens) for finished in observer.finished
        ]
        assert sorted(accounted) == sorted(used)
        assert sum(prompt_tokens for _, prompt_tokens, _ in used) == observer.prompt_tokens
        assert sum(output_tokens for _, _, output_tokens in used) == observer.generated_tokens
        assert observer.generated_tokens == observer.num_first_tokens + observer.num_inter_tokens
        assert sum(stats.prompt_tokens for stats in observer.stats) <= sum(engine.executor.computed.values())
        assert [stats.step for stats in observer.stats] == list(range(1, engine.core.num_steps + 1))


async def test_usage_tells_cached_tokens_once_and_a_request_that_never_ran_has_no_queue_time() -> None:
    async with running() as engine:
        for name in ("first", "again"):
            await read_one(engine, make_request(range(17), name, n=2, max_tokens=1))
        async with engine.llm.stream(make_request(range(17), "gone")):
            pass
        first, again, gone = engine.observer.finished
        assert (first.cached_tokens, again.cached_tokens) == (0, 16)
        assert first.queue_seconds is not None
        assert (gone.reason, gone.prompt_tokens, gone.output_tokens) == (FinishReason.ABORT, 17, 0)
        assert gone.queue_seconds is gone.prefill_seconds is gone.decode_seconds is None
        assert (first.output_tokens, first.longest_output) == (2, 1)
        assert first.prefill_seconds is not None
        assert first.decode_seconds is not None
