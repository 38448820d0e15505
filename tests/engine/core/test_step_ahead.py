"""Planning a step ahead changes when things are computed, and nothing that anybody gets.

`test_scheduler_properties` drives both depths through everything at once; here is what each promise looks like alone.
"""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
from anyio import to_thread

from engine.commands import AddRequests, Close
from engine.config import EngineConfig
from engine.core.core import MAX_FAILURES_IN_A_ROW, EngineCore
from engine.detokenizer import Vocabulary
from engine.errors import EngineDead, StepAbandoned
from engine.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    StructuredOutput,
    StructuredOutputKind,
)
from engine.plan import ModelRunnerOutput, SchedulerOutput
from engine.structured.compiler import GrammarCompiler
from engine.transport.channel import RequestChannel
from engine.transport.client import run_until_closed
from tests.engine.helpers import (
    assert_nothing_left,
    byte_level_tokenizer,
    make_core,
    make_request,
    run_to_end,
    simulated,
    tokens_of,
    until,
)
from tests.engine.queueing_executor import QueueingExecutor
from tests.engine.simulated_tokens import expected_output

VOCAB_SIZE, MAX_MODEL_LEN = 1000, 128


def core_ahead(**options: Any) -> EngineCore:
    return make_core(pipeline_depth=2, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, **options)


def queue_of(core: EngineCore) -> QueueingExecutor:
    executor = simulated(core)
    assert isinstance(executor, QueueingExecutor)
    return executor


def expected_tokens(request: EngineCoreRequest, eos_token_ids: tuple[int, ...] = ()) -> list[int]:
    return expected_output(
        request.prompt_token_ids,
        request.sampling,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=eos_token_ids,
    ).token_ids


def assert_right(outputs: dict[str, list[EngineCoreOutput]], requests: list[EngineCoreRequest]) -> None:
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected_tokens(request)


def test_a_step_is_planned_and_submitted_before_the_one_before_it_has_run() -> None:
    core = core_ahead()
    core.add(make_request(range(5), "a", max_tokens=4))
    assert core.step().outputs[0].new_token_ids == expected_tokens(make_request(range(5), max_tokens=1))
    prefill, decode = queue_of(core).plans
    assert (prefill.num_scheduled_tokens, decode.num_scheduled_tokens) == ([5], [1])
    assert queue_of(core).computed["a"] == 5  # the second has not run, though it was submitted before the first ended
    assert core.has_work


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_token_is_computed_beyond_max_tokens_or_the_context(max_tokens: int) -> None:
    core = core_ahead()
    long = make_request(range(500, 500 + MAX_MODEL_LEN - 3), "long")
    core.add(make_request(range(5), "a", max_tokens=max_tokens))
    core.add(long)
    outputs = run_to_end(core)
    assert len(tokens_of(outputs["a"])) == max_tokens
    assert queue_of(core).computed == {"a": 5 + max_tokens - 1, "long": MAX_MODEL_LEN - 1}
    assert_nothing_left(core)


def test_an_end_that_only_the_token_tells_costs_one_token_which_nobody_sees() -> None:
    request = make_request(range(5), "a", max_tokens=30)
    stop = expected_tokens(request)[10]
    length = expected_tokens(request).index(stop) + 1
    core = core_ahead(eos_token_ids=(stop,))
    core.add(request)
    outputs = run_to_end(core)
    assert tokens_of(outputs["a"]) == expected_tokens(request, (stop,))
    assert outputs["a"][-1].finish_reason is FinishReason.STOP
    assert queue_of(core).computed["a"] == 5 + length  # one step late
    assert_nothing_left(core)


def test_who_leaves_in_flight_gives_back_at_once_and_is_heard_of_no_more() -> None:
    core = core_ahead(num_blocks=33)  # a block more than one request of the full context needs
    core.add(make_request(range(100), "gone", max_tokens=20))
    while not any(output.new_token_ids for output in core.step().outputs):
        pass
    core.finish_request("gone", FinishReason.ABORT)
    assert core.scheduler.kv.usage == 0.0
    follower = make_request(range(200, 320), "follower", max_tokens=5)
    core.add(follower)  # its blocks are those that the step in flight still writes to
    outputs = run_to_end(core)
    assert set(outputs) == {"follower"}
    assert_right(outputs, [follower])
    assert_nothing_left(core)


def test_an_id_can_be_used_again_while_a_step_with_its_first_owner_is_in_flight() -> None:
    core = core_ahead()
    core.add(make_request(range(9), "same", max_tokens=20))
    core.step()
    core.finish_request("same", FinishReason.ABORT)
    again = make_request(range(50, 57), "same", max_tokens=6)
    core.add(again)
    assert_right(run_to_end(core), [again])


def test_a_prompt_that_is_in_flight_is_prefilled_once() -> None:
    core = core_ahead(max_num_batched_tokens=24)
    prompt = range(60)
    core.add(make_request(prompt, "first", max_tokens=10))
    core.step()
    for number in range(3):
        core.add(make_request(prompt, f"later-{number}", max_tokens=10))
    run_to_end(core)
    for number in range(3):
        assert queue_of(core).computed[f"later-{number}"] == 4 + 9  # the last block of the prompt, and the output


def test_a_request_preempted_in_flight_says_what_it_would_have_said() -> None:
    core = core_ahead(num_blocks=32)
    requests = [make_request([number] * 20, f"r{number}", max_tokens=60) for number in range(4)]
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert sum(event.kind == "preempted" for output in outputs["r3"] for event in output.events or ()) > 0
    assert_right(outputs, requests)
    assert_nothing_left(core)


@pytest.mark.parametrize("fast", [0.0, 1.0, 0.5])
def test_a_poison_is_found_and_what_was_planned_on_top_of_it_is_made_again(fast: float) -> None:
    def poisoned(plan: SchedulerOutput) -> None:
        if "r5" in plan.request_ids and core.num_steps > 6:
            raise MemoryError

    core = core_ahead(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=64, before_step=poisoned)
    queue_of(core).fast = fast
    requests = [make_request([number, *range(12)], f"r{number}", max_tokens=20) for number in range(16)]
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert outputs["r5"][-1].finish_reason is FinishReason.ERROR
    assert_right(outputs, [request for request in requests if request.request_id != "r5"])
    assert tokens_of(outputs["r5"]) == expected_tokens(requests[5])[: len(tokens_of(outputs["r5"]))]
    assert_nothing_left(core)


def test_a_step_that_could_not_even_be_submitted_counts_as_one_that_failed() -> None:
    class Refusing(QueueingExecutor):
        num_refused = 0

        def submit(self, plan, abandoned=None):
            if plan.step in (3, 4, 9):
                self.num_refused += 1
                self._introduced.update(new.request_id for new in plan.new_requests)
                raise RuntimeError("out of memory")
            return super().submit(plan, abandoned)

    executor = Refusing(64, 4, VOCAB_SIZE)
    core = EngineCore(EngineConfig(max_model_len=MAX_MODEL_LEN, pipeline_depth=2), executor)
    requests = [make_request([number, 1, 2], f"r{number}", max_tokens=12) for number in range(4)]
    for request in requests:
        core.add(request)
    assert_right(run_to_end(core), requests)
    assert executor.num_refused == 3
    assert_nothing_left(core)


def test_a_device_that_always_fails_is_given_up() -> None:
    num_failures = 0

    def broken(plan: SchedulerOutput) -> None:
        nonlocal num_failures
        num_failures += 1
        raise MemoryError

    core = core_ahead(before_step=broken)
    for number in range(40):
        core.add(make_request([number, 1], max_tokens=9))
    with pytest.raises(EngineDead):
        run_to_end(core)
    assert num_failures <= 2 * MAX_FAILURES_IN_A_ROW + 2 * math.log2(8) + 2


def test_numbers_that_are_not_finite_end_their_request_though_the_next_step_is_on_its_way() -> None:
    class NotFinite(QueueingExecutor):
        def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            output = super()._run(plan)
            output.not_finite = [index for index, name in enumerate(plan.request_ids) if name == "bad"]
            return output

    executor = NotFinite(64, 4, VOCAB_SIZE)
    core = EngineCore(EngineConfig(max_model_len=MAX_MODEL_LEN, pipeline_depth=2), executor)
    good = make_request(range(21), "good", max_tokens=9)
    core.add(make_request(range(20), "bad", max_tokens=9))
    core.add(good)
    outputs = run_to_end(core)
    assert [output.finish_reason for output in outputs["bad"] if output.finish_reason] == [FinishReason.ERROR]
    assert tokens_of(outputs["bad"]) == []
    assert_right(outputs, [good])
    assert_nothing_left(core)


def test_a_step_that_was_broken_off_is_made_again_where_somebody_wants_it_after_all() -> None:
    def abandon(plan: SchedulerOutput) -> None:
        if plan.request_ids and plan.step % 3 == 0:
            raise StepAbandoned("so it seemed")

    core = core_ahead(before_step=abandon, max_num_batched_tokens=16)
    requests = [make_request([number, *range(20)], f"r{number}", max_tokens=8) for number in range(3)]
    for request in requests:
        core.add(request)
    assert_right(run_to_end(core), requests)
    assert_nothing_left(core)


def test_each_step_is_asked_for_its_own_requests_whether_anybody_wants_it() -> None:
    asked: list[tuple[str, ...]] = []

    class Asking(QueueingExecutor):
        def submit(self, plan, abandoned=None):
            assert not abandoned()
            step = super().submit(plan)
            assert not abandoned()
            return step

    core = EngineCore(EngineConfig(max_model_len=MAX_MODEL_LEN, pipeline_depth=2), Asking(64, 4, VOCAB_SIZE))
    core.add(make_request(range(8), "a", max_tokens=3))
    core.add(make_request(range(8), "b", max_tokens=1))
    while core.has_work:
        core.step(lambda request_ids: bool(asked.append(tuple(request_ids))))  # type: ignore[func-returns-value]
    assert [ids for ids in asked if ids] == [
        tuple(p.request_ids) for p in queue_of(core).plans for _ in "12" if p.request_ids
    ]


def test_deeper_than_two_is_refused() -> None:
    for depth in (0, 3):
        with pytest.raises(ValueError, match="pipeline_depth must be 1 to 2"):
            EngineConfig(max_model_len=8, pipeline_depth=depth)


def test_what_a_grammar_has_to_read_first_is_not_planned_ahead() -> None:
    class Watching(QueueingExecutor):
        def submit(self, plan, abandoned=None):
            in_flight = [request_id for step in self._in_flight for request_id in step.plan.request_ids]
            assert not {"bound"}.intersection(plan.request_ids, in_flight)
            return super().submit(plan, abandoned)

    tokenizer = byte_level_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(Vocabulary(tokenizer), vocab_size=vocab_size, eos_token_ids=(258,))
    executor = Watching(64, 4, vocab_size)
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, pipeline_depth=2, eos_token_ids=(258,))
    core = EngineCore(config, executor, compiler)
    grammar = StructuredOutput(kind=StructuredOutputKind.REGEX, value="(xy){5}")
    core.add(make_request(range(9), "free", max_tokens=60, ignore_eos=True))
    core.add(make_request(range(20, 29), "bound", structured_output=grammar))
    outputs = run_to_end(core)
    assert tokenizer.decode(tokens_of(outputs["bound"])) == "xy" * 5
    assert len(tokens_of(outputs["free"])) == 60
    assert executor.most_in_flight == 2
    core.shutdown()


@pytest.mark.anyio
async def test_an_idle_engine_lets_its_executor_prepare_and_serves_who_comes_meanwhile() -> None:
    class Preparing(QueueingExecutor):
        num_pieces = 5

        def prepare(self) -> bool:
            self.num_pieces -= 1
            return self.num_pieces > 0

    executor = Preparing(64, 4, VOCAB_SIZE)
    core = EngineCore(EngineConfig(max_model_len=MAX_MODEL_LEN, pipeline_depth=2), executor)
    received: list[Any] = []
    channel = RequestChannel(received.extend)
    channel.put(AddRequests.of([make_request(range(5), "a", max_tokens=3)]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(to_thread.run_sync, run_until_closed, core, channel)
        await until(lambda: executor.num_pieces == 0 and not core.has_work and core.heartbeat.is_asleep)
        channel.put(Close())
    tokens = [token for step in received for output in step.outputs for token in output.new_token_ids]
    assert tokens == expected_tokens(make_request(range(5), max_tokens=3))
