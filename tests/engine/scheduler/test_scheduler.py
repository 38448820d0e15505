"""Who runs in which step, for how many tokens: exact traces of the scheduler over the simulated executor."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.frontend.input_processor import InputProcessor
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams
from engine.plan import SchedulerOutput
from engine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import (
    assert_nothing_left,
    batches,
    byte_level_tokenizer,
    make_core,
    make_request,
    make_scheduler,
    run_to_end,
    simulated,
    tokens_of,
)
from tests.engine.simulated_tokens import ExpectedOutput, expected_output


def expected(core: EngineCore, request: EngineCoreRequest) -> ExpectedOutput:
    return expected_output(
        request.prompt_token_ids,
        request.sampling,
        vocab_size=core.executor.vocab_size,
        max_model_len=core.config.max_model_len,
        eos_token_ids=core.config.eos_token_ids,
    )


def preemptions(core: EngineCore, request_id: str) -> int:
    return core.scheduler.requests[request_id].num_preemptions


# --- one request


def test_lifecycle_of_one_request_is_waiting_running_finished() -> None:
    core = make_core(max_num_seqs=4, max_num_batched_tokens=4)
    core.add(make_request(range(10), "r", max_tokens=3))
    request = core.scheduler.requests["r"]
    trace = [(request.status.name, request.num_computed_tokens, request.num_tokens)]
    while request.status not in FINISH_REASONS:
        core.step()
        trace.append((request.status.name, request.num_computed_tokens, request.num_tokens))
    assert trace == [
        ("WAITING", 0, 10),
        ("RUNNING", 4, 10),
        ("RUNNING", 8, 10),
        ("RUNNING", 10, 11),  # caught up with the prompt: the first token
        ("RUNNING", 11, 12),
        ("FINISHED_LENGTH_CAPPED", 0, 13),  # its blocks are given back, and with them what was computed
    ]
    assert core.has_work  # the executor still holds its row
    core.step()
    assert_nothing_left(core)


def test_a_hand_written_loop_gives_the_same_tokens_as_the_engine_core() -> None:
    requests = [make_request(range(i, i + 9), f"r{i}", max_tokens=6) for i in range(5)]
    core = make_core(num_blocks=14, max_model_len=24, max_num_seqs=4, max_num_batched_tokens=12)
    for request in requests:
        core.add(request)
    by_core = {request_id: tokens_of(outputs) for request_id, outputs in run_to_end(core).items()}

    scheduler = make_scheduler(core.config, num_blocks=14, block_size=4)
    executor = CheckedExecutor(14, 4, core.executor.vocab_size)
    for request in requests:
        scheduler.add(request)
    by_hand: dict[str, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()  # plan
        sampled = executor.submit(plan).result()  # run and pick
        for output in scheduler.update(plan, sampled):  # bookkeep
            by_hand.setdefault(output.request_id, []).extend(output.new_token_ids)

    assert by_hand == by_core == {request.request_id: expected(core, request).token_ids for request in requests}


@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8, 31, 32, 33, 127])
def test_prompts_of_any_length_around_block_and_budget_edges_give_their_tokens(prompt_length: int) -> None:
    core = make_core()
    request = make_request(range(prompt_length))
    core.add(request)
    assert tokens_of(run_to_end(core)[request.request_id]) == expected(core, request).token_ids
    assert_nothing_left(core)


# --- batches


def test_running_streams_decode_first_while_a_long_prompt_is_chunked() -> None:
    core = make_core(max_num_batched_tokens=10, max_num_seqs=4)
    core.add(make_request([1, 2, 3], "a", max_tokens=10))
    core.add(make_request([4, 5], "b", max_tokens=10))
    core.step()
    core.add(make_request(range(20), "long", max_tokens=10))
    for _ in range(4):
        core.step()
    assert batches(core) == [
        {"a": 3, "b": 2},
        {"a": 1, "b": 1, "long": 8},
        {"a": 1, "b": 1, "long": 8},
        {"a": 1, "b": 1, "long": 4},
        {"a": 1, "b": 1, "long": 1},
    ]


def test_a_late_decoder_goes_before_an_earlier_prefill() -> None:
    core = make_core(max_num_batched_tokens=4, max_num_seqs=4)
    core.add(make_request(range(10), "long", max_tokens=2))
    core.step()
    core.step()
    core.add(make_request([1, 2], "short", max_tokens=5))
    core.step()  # two tokens of `long` remain, so there is room for `short`
    core.add(make_request(range(20, 30), "next", max_tokens=2))
    core.step()
    core.step()
    assert batches(core) == [
        {"long": 4},
        {"long": 4},
        {"long": 2, "short": 2},
        {"long": 1, "short": 1, "next": 2},
        {"short": 1, "next": 3},
    ]


def test_without_a_seat_a_request_waits() -> None:
    core = make_core(max_num_seqs=2)
    for name in "abc":
        core.add(make_request([ord(name)], name, max_tokens=2))
    run_to_end(core)
    assert batches(core) == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"c": 1}, {"c": 1}]


def test_a_request_whose_prompt_would_not_fit_waits_and_nobody_passes_it() -> None:
    core = make_core(num_blocks=4, block_size=4, max_model_len=16)
    core.add(make_request([1] * 9, "a", max_tokens=2))
    core.add(make_request([2] * 8, "b", max_tokens=1))
    core.add(make_request([3], "c", max_tokens=1))
    run_to_end(core)
    # `c` would have found a block at once, but then `b` might wait for ever.
    assert batches(core) == [{"a": 9}, {"a": 1}, {"b": 8, "c": 1}]


def test_a_prompt_that_is_being_prefilled_for_another_waits_one_step_and_shares() -> None:
    core = make_core()
    core.add(make_request([*range(12), 100], "a", max_tokens=2))
    core.add(make_request([*range(12), 200], "b", max_tokens=2))
    core.add(make_request([*range(50, 58), 201], "other", max_tokens=2))
    run_to_end(core)
    assert batches(core) == [{"a": 13, "other": 9}, {"a": 1, "other": 1, "b": 1}, {"b": 1}]


def test_children_of_one_request_prefill_their_shared_prompt_once() -> None:
    core = make_core(block_size=4)
    (children,) = InputProcessor(byte_level_tokenizer(), vocab_size=1000, max_model_len=128, seed=0).process(
        [make_request(range(18), n=4, max_tokens=1, temperature=1.0)]
    )
    for child in children:
        core.add(child)
    outputs = run_to_end(core)
    # 16 tokens fill blocks, which are shared; the 2 after them are each child's own.
    assert sum(simulated(core).computed.values()) == 16 + 4 * 2
    assert [outputs[child.request_id][0].num_cached_tokens for child in children] == [0, 16, 16, 16]
    assert len({tuple(tokens_of(outputs[child.request_id])) for child in children}) > 1


def test_a_crowd_with_one_beginning_holds_up_nobody_behind_it() -> None:
    core = make_core(max_num_seqs=4, max_num_batched_tokens=64, block_size=4)
    for number in range(30):
        core.add(make_request([*range(40), 100 + number], f"crowd-{number}", max_tokens=2))
    core.add(make_request([7, 8, 9], "short", max_tokens=2))
    core.add(make_request([500, *range(1, 12)], "other", max_tokens=2))
    core.step()
    assert set(batches(core)[0]) == {"crowd-0", "short", "other"}
    outputs = run_to_end(core)
    assert len(outputs) == 32
    assert sum(simulated(core).computed.values()) <= 40 + 30 * 2 + 2 * 13 + 8, "and its beginning was computed once"


# --- prefix cache


def test_a_repeated_prompt_is_found_in_the_cache_but_for_its_last_token() -> None:
    core = make_core(block_size=4)
    stats = []
    for name in ("first", "again", "longer"):
        core.add(make_request(range(8 if name != "longer" else 9), name, max_tokens=1))
        stats.append(core.step().stats)
        run_to_end(core)
    assert simulated(core).computed == {"first": 8, "again": 4, "longer": 1}
    assert [(s.prefix_cache_queries, s.prefix_cache_hits, s.prompt_tokens) for s in stats] == [
        (8, 0, 8),
        (8, 4, 4),
        (9, 8, 1),
    ]
    core.add(make_request(range(8), max_tokens=1, prompt_logprobs=1))  # which looks for nothing
    assert core.step().stats.prefix_cache_queries == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [14, 20])
def test_work_that_a_preemption_makes_necessary_again_is_counted(depth: int, num_blocks: int) -> None:
    core = make_core(
        num_blocks=num_blocks, block_size=4, max_model_len=48, max_num_batched_tokens=12, pipeline_depth=depth
    )
    for number in range(6):
        core.add(make_request(range(20 * number, 20 * number + 9), max_tokens=24, priority=number % 2))
    stats = []
    while core.has_work:
        stats.append(core.step().stats)
    plans = simulated(core).plans
    resumed = [new for plan in plans for new in plan.new_requests]
    assert sum(each.num_preemptions for each in stats) > 2
    assert sum(each.prompt_tokens for each in stats) == sum(plan.num_prefill_tokens for plan in plans)
    assert sum(each.computed_tokens for each in stats) == sum(plan.total_num_scheduled_tokens for plan in plans)
    assert sum(each.prefix_cache_queries for each in stats) == sum(len(new.token_ids) for new in resumed)
    assert sum(each.prefix_cache_hits for each in stats) == sum(new.num_computed_tokens for new in resumed) > 0


def test_what_a_request_generated_is_found_by_the_next_turn_of_its_conversation() -> None:
    core = make_core(block_size=4)
    core.add(make_request(range(6), "turn-1", max_tokens=7))
    answer = tokens_of(run_to_end(core)["turn-1"])
    core.add(make_request([*range(6), *answer, 1, 2], "turn-2", max_tokens=1))
    (output,) = run_to_end(core)["turn-2"]
    assert output.num_cached_tokens == 12  # of 13 tokens, the last was sampled and never computed


def test_tenants_do_not_share_blocks() -> None:
    core = make_core()
    for name, tenant in (("a", "red"), ("b", "blue"), ("c", "red")):
        core.add(make_request(range(12), name, tenant=tenant, max_tokens=1))
    run_to_end(core)
    assert simulated(core).computed == {"a": 12, "b": 12, "c": 4}


@pytest.mark.parametrize(("prompt_form_differs", "cached"), [(False, 12), (True, 8)])
def test_an_answer_is_the_next_prompts_prefix_unless_prompts_are_computed_otherwise(
    prompt_form_differs: bool, cached: int
) -> None:
    core = make_core(prompt_form_differs=prompt_form_differs)
    core.add(make_request(range(9), "first", max_tokens=5))
    answer = tokens_of(run_to_end(core)["first"])
    for name, expected_cached in (("second", cached), ("third", 12)):  # by then they were computed as a prompt
        core.add(make_request([*range(9), *answer], name, max_tokens=1))
        assert run_to_end(core)[name][0].num_cached_tokens == expected_cached


@pytest.mark.parametrize("prompt_form_differs", [False, True])
def test_a_preempted_request_finds_what_it_generated_itself(prompt_form_differs: bool) -> None:
    core = make_core(prompt_form_differs=prompt_form_differs)
    request = make_request(range(9), "request", max_tokens=5)
    core.add(request)
    run_to_end(core)
    tokens = [*range(9), *expected(core, request).token_ids]

    def blocks_found(num_prompt_tokens: int) -> int:
        message = make_request(tokens[:num_prompt_tokens], max_tokens=5)
        resumed = Request(message, sequence_number=1, eos_token_ids=(), max_model_len=128)
        resumed.token_ids[:] = tokens
        return len(core.scheduler.kv.find_prefix(resumed))

    assert blocks_found(9) == 3
    assert blocks_found(10) == (2 if prompt_form_differs else 3), "the tenth is another's prompt"


def test_without_prefix_caching_everything_is_computed() -> None:
    core = make_core(enable_prefix_caching=False)
    for name in "ab":
        core.add(make_request(range(12), name, max_tokens=1))
    run_to_end(core)
    assert simulated(core).computed == {"a": 12, "b": 12}
    assert core.scheduler.kv.pool.num_cached == 0


# --- preemption, priority


def test_a_preempted_request_resumes_before_later_arrivals_and_gives_the_same_tokens() -> None:
    core = make_core(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=2)
    requests = [make_request([value] * 7, name, max_tokens=12) for name, value in (("a", 1), ("b", 2), ("late", 3))]
    for request in requests:
        core.add(request)
    early: dict[str, list[EngineCoreOutput]] = {"a": [], "b": [], "late": []}
    while preemptions(core, "b") == 0:
        for output in core.step().outputs:
            early[output.request_id].append(output)
    assert core.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    assert [request.request_id for request in core.scheduler.waiting] == ["b", "late"]
    outputs = run_to_end(core)
    introduced = [new.request_id for plan in simulated(core).plans for new in plan.new_requests]
    assert introduced[:4] == ["a", "b", "b", "late"]
    for name, request in zip(("a", "b", "late"), requests, strict=True):
        assert tokens_of([*early[name], *outputs[name]]) == expected(core, request).token_ids
    assert_nothing_left(core)


def test_who_is_preempted_after_being_planned_is_taken_out_of_the_plan() -> None:
    core = make_core(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=2)
    background = make_request([1] * 5, "background", priority=1, max_tokens=12)
    urgent = make_request([2] * 8, "urgent", priority=0, max_tokens=12)
    core.add(background)
    early = core.step().outputs  # so that it stands before `urgent` in the batch
    core.add(urgent)
    outputs = run_to_end(core)
    # In step 7 `urgent` needs a fourth block, and `background` with its three has got its token of the step already.
    assert batches(core)[5:7] == [{"background": 1, "urgent": 1}, {"urgent": 1}]
    assert tokens_of(outputs["urgent"]) == expected(core, urgent).token_ids
    assert tokens_of([*early, *outputs["background"]]) == expected(core, background).token_ids
    assert_nothing_left(core)


def test_the_smaller_priority_value_goes_first_then_the_earlier_arrival() -> None:
    core = make_core(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        core.add(make_request([ord(name)], name, priority=priority, max_tokens=1))
    run_to_end(core)
    assert [next(iter(batch)) for batch in batches(core)] == ["c", "a", "d", "b"]


# --- a step that raises


def test_a_step_that_raises_once_ends_nobody() -> None:
    failing = False

    def break_once(_: object) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise MemoryError("secret prompt text")

    core = make_core(max_num_seqs=2, before_step=break_once)
    requests = [make_request(range(9), name, max_tokens=20) for name in ("a", "b", "waiting")]
    for request in requests:
        core.add(request)
    core.step()
    core.step()
    failing = True
    assert core.step().outputs == []
    assert core.scheduler.kv.usage == 0.0
    assert core.num_steps == 3  # the heart beats on
    outputs = run_to_end(core)
    for request in requests:
        assert tokens_of(outputs[request.request_id])[-10:] == expected(core, request).token_ids[-10:]
    assert_nothing_left(core)


def test_of_a_batch_that_fails_only_the_request_at_fault_ends() -> None:
    def break_on_poison(plan: SchedulerOutput) -> None:
        if "poison" in plan.request_ids and core.num_steps >= 2:
            raise MemoryError("secret prompt text")

    core = make_core(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=64, before_step=break_on_poison)
    requests = [make_request([i, *range(8)], name, max_tokens=12) for i, name in enumerate("abcdef")]
    for request in (*requests[:3], make_request(range(9), "poison", max_tokens=12), *requests[3:]):
        core.add(request)
    outputs = run_to_end(core)
    end = outputs["poison"][-1]
    assert end.finish_reason is FinishReason.ERROR
    assert "MemoryError" in (end.error or "")
    assert "secret" not in (end.error or "")
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected(core, request).token_ids
    assert_nothing_left(core)


def test_a_step_that_raised_left_nothing_to_be_found_in_the_prefix_cache() -> None:
    def fail_first_prefill(_: object) -> None:
        if core.num_steps == 0:
            raise RuntimeError("the device broke")

    core = make_core(before_step=fail_first_prefill)
    core.add(make_request(range(12), "broken", max_tokens=3))
    core.step()
    assert core.scheduler.kv.pool.num_cached == 0
    again = make_request(range(12), "again", max_tokens=3)
    core.add(again)
    outputs = run_to_end(core)
    for request_id in ("broken", "again"):
        assert tokens_of(outputs[request_id]) == expected(core, again).token_ids


# --- limits


def test_a_pool_too_small_for_one_request_is_refused_at_the_start() -> None:
    config = EngineConfig(max_model_len=65)
    with pytest.raises(ValueError, match="65 tokens does not fit into 4 KV blocks of 16"):
        make_scheduler(config, num_blocks=4, block_size=16)


def test_a_budget_smaller_than_the_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineConfig(max_model_len=10, max_num_seqs=8, max_num_batched_tokens=7)


def test_stats_are_levels_and_this_steps_counts() -> None:
    core = make_core(max_num_seqs=1, num_blocks=32)
    core.add(make_request(range(8), "a", max_tokens=2))
    core.add(make_request([1], "b", max_tokens=1))
    first, second = core.step().stats, core.step().stats
    assert (first.num_running, first.num_waiting, first.prompt_tokens, first.kv_cache_usage) == (1, 1, 8, 2 / 32)
    assert (second.num_running, second.num_waiting, second.prompt_tokens, second.kv_cache_usage) == (0, 1, 0, 0.0)


def test_sampling_params_travel_unchanged_to_the_executor() -> None:
    core = make_core(eos_token_ids=(7,))
    sampling = SamplingParams(temperature=0.7, seed=3, stop_token_ids=(2,), max_tokens=1)
    core.add(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling=sampling, arrival_time=0.0))
    core.step()
    (new,) = simulated(core).plans[0].new_requests
    assert new.sampling is sampling
    assert new.stop_token_ids == [2, 7]
