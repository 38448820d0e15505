"""A step that fails ends the requests at fault and nobody else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.core import MAX_FAILURES_IN_A_ROW, EngineCore
from engine.errors import EngineDead
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import assert_nothing_left, make_core, make_request, run_to_end, simulated, tokens_of
from tests.engine.simulated_tokens import expected_output


class FaultyDevice:
    """Makes the steps raise whose plans `is_broken` picks, and counts them."""

    def __init__(self, is_broken: Callable[[SchedulerOutput], bool]) -> None:
        self.is_broken = is_broken
        self.num_failures = 0

    def __call__(self, plan: SchedulerOutput) -> None:
        if self.is_broken(plan):
            self.num_failures += 1
            raise MemoryError("of /dev/secret0 at 0x7f")


def faulty_core(is_broken: Callable[[SchedulerOutput], bool], **options: Any) -> tuple[EngineCore, FaultyDevice]:
    device = FaultyDevice(is_broken)
    options = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
    return make_core(before_step=device, **options), device


def crowd(number: int, *, max_tokens: int = 20, prompt: int = 9) -> list[EngineCoreRequest]:
    return [make_request([i, *range(prompt - 1)], f"r{i}", max_tokens=max_tokens) for i in range(number)]


def expected_tokens(core: EngineCore, request: EngineCoreRequest) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling, vocab_size=1000, max_model_len=core.config.max_model_len
    ).token_ids


def assert_only_these_failed(
    core: EngineCore,
    requests: list[EngineCoreRequest],
    outputs: Mapping[str, list[EngineCoreOutput]],
    guilty: Collection[str] = (),
) -> None:
    for request in requests:
        end = outputs[request.request_id][-1]
        tokens = tokens_of(outputs[request.request_id])
        expected = expected_tokens(core, request)
        if request.request_id in guilty:
            assert end.finish_reason is FinishReason.ERROR
            assert end.error
            assert "secret" not in end.error
            assert tokens == expected[: len(tokens)]  # what it got before it failed was right
        else:
            assert end.finish_reason is FinishReason.LENGTH
            assert end.error is None
            assert tokens == expected
    assert_nothing_left(core)


# --- an exception


@pytest.mark.parametrize("failing_step", [1, 2, 3, 12])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_exception_in_one_step_once_ends_nobody(failing_step: int, prefix_caching: bool) -> None:
    core, device = faulty_core(lambda plan: plan.step == failing_step, enable_prefix_caching=prefix_caching)
    requests = crowd(16)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert device.num_failures == 1
    assert_only_these_failed(core, requests, outputs)


def test_a_lone_request_whose_step_fails_once_goes_on() -> None:
    core, device = faulty_core(lambda plan: plan.step == 4)
    (request,) = requests = crowd(1)
    core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core))
    assert device.num_failures == 1


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("position", [0, 7, 15])
def test_one_poison_among_sixteen_is_found_by_bisection(position: int, prefix_caching: bool) -> None:
    poison = f"r{position}"
    core, device = faulty_core(lambda plan: poison in plan.request_ids, enable_prefix_caching=prefix_caching)
    requests = crowd(16)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert device.num_failures <= 2 * math.log2(16) + 2
    assert_only_these_failed(core, requests, outputs, {poison})


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_request_that_is_poison_from_its_thirtieth_token_on(prefix_caching: bool) -> None:
    core, device = faulty_core(
        lambda plan: "r5" in plan.request_ids and core.scheduler.requests["r5"].num_output_tokens >= 30,
        enable_prefix_caching=prefix_caching,
    )
    requests = crowd(16, max_tokens=40)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert device.num_failures <= 2 * math.log2(16) + 2
    assert len(tokens_of(outputs["r5"])) == 30
    assert_only_these_failed(core, requests, outputs, {"r5"})


@pytest.mark.parametrize("pair", [("r0", "r15"), ("r6", "r7"), ("r3", "r12")])
def test_two_poisons_are_both_found(pair: tuple[str, str]) -> None:
    core, device = faulty_core(lambda plan: not set(pair).isdisjoint(plan.request_ids))
    requests = crowd(16)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert device.num_failures <= 2 * (2 * math.log2(16) + 2)
    assert_only_these_failed(core, requests, outputs, set(pair))


def test_a_poison_is_found_in_a_pool_that_holds_hardly_more_than_one_request() -> None:
    core, _ = faulty_core(
        lambda plan: "r2" in plan.request_ids, num_blocks=10, block_size=4, max_model_len=36, max_num_seqs=8
    )
    requests = crowd(8, max_tokens=25)
    for request in requests:
        core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core, 3000), {"r2"})


def test_a_poison_is_found_when_requests_run_one_at_a_time() -> None:
    core, device = faulty_core(lambda plan: "r1" in plan.request_ids, max_num_seqs=1)
    requests = crowd(4)
    for request in requests:
        core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core), {"r1"})
    assert device.num_failures == 2  # together with nobody else, and once more to be sure


def test_a_poison_is_found_while_its_prompt_is_prefilled_in_chunks_beside_running_streams() -> None:
    core, _ = faulty_core(lambda plan: "long" in plan.request_ids and core.num_steps > 4, max_num_batched_tokens=24)
    requests = crowd(6)
    for request in requests:
        core.add(request)
    early = core.step().outputs
    poison = make_request(range(500, 600), "long", max_tokens=5)
    core.add(poison)
    outputs = run_to_end(core)
    for output in reversed(early):
        outputs[output.request_id].insert(0, output)
    assert_only_these_failed(core, [*requests, poison], outputs, {"long"})


def test_a_poison_of_a_tenant_at_its_limit_is_found() -> None:
    core, _ = faulty_core(lambda plan: "r0" in plan.request_ids and core.num_steps > 3)
    requests = crowd(8)
    for number, request in enumerate(requests):
        request.tenant = "limited" if number < 5 else "free"
        request.tenant_max_running = 2 if number < 5 else 0
        core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core), {"r0"})


def test_suspects_that_leave_hold_nobody_up() -> None:
    core, _ = faulty_core(lambda plan: "r3" in plan.request_ids)
    requests = crowd(8)
    for request in requests:
        core.add(request)
    core.step()
    for request in requests[:4]:
        core.finish_request(request.request_id, FinishReason.ABORT)
    assert_only_these_failed(core, requests[4:], run_to_end(core))


def test_newcomers_are_served_after_the_culprit_is_found() -> None:
    core, _ = faulty_core(lambda plan: "r3" in plan.request_ids)
    requests = crowd(8)
    for request in requests[:4]:
        core.add(request)
    outputs = {output.request_id: [output] for output in core.step().outputs}
    assert not outputs
    for request in requests[4:]:
        core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core), {"r3"})


@pytest.mark.parametrize("most", [1, 3, 5])
def test_an_out_of_memory_that_only_large_batches_provoke_ends_nobody(most: int) -> None:
    core, device = faulty_core(lambda plan: len(plan.request_ids) > most)
    requests = crowd(16, max_tokens=6)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core, 5000)
    assert device.num_failures > 0
    assert_only_these_failed(core, requests, outputs)


def test_a_failed_step_is_not_trusted_to_have_let_go_of_rows() -> None:
    """Removals go out again: an executor that failed before it took them in would run out of rows."""

    class LosesOnePlan(CheckedExecutor):
        has_lost = False

        def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> Any:
            if plan.removed_request_ids and not self.has_lost:
                self.has_lost = True
                self._introduced.update(new.request_id for new in plan.new_requests)
                raise OSError("the plan did not get there")
            return super().submit(plan, abandoned)

    executor = LosesOnePlan(64, 4, 1000, max_num_seqs=2)
    core = EngineCore(make_core(max_num_seqs=2).config, executor)
    requests = [make_request([i] * 5, f"r{i}", max_tokens=3 + 3 * i) for i in range(6)]
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    assert executor.has_lost
    assert_only_these_failed(core, requests, outputs)


# --- a device that is broken


def test_a_device_that_always_fails_is_given_up_after_a_bounded_number_of_failures() -> None:
    core, device = faulty_core(lambda plan: True)
    for request in crowd(40):
        core.add(request)
    with pytest.raises(EngineDead):
        run_to_end(core)
    assert device.num_failures <= 2 * MAX_FAILURES_IN_A_ROW + 2


def test_a_device_that_fails_every_lone_request_is_given_up_too() -> None:
    """Steps without requests succeed, because they do not reach the device; that is no sign of health."""
    core, device = faulty_core(lambda plan: bool(plan.request_ids))
    with pytest.raises(EngineDead):  # noqa: PT012
        for request in crowd(100):
            core.add(request)
            run_to_end(core)
    assert device.num_failures <= 2 * MAX_FAILURES_IN_A_ROW


def test_a_device_that_fails_without_any_request_is_given_up_rather_than_asked_for_ever() -> None:
    core, _ = faulty_core(lambda plan: not plan.request_ids)
    core.add(make_request([1], max_tokens=1))
    with pytest.raises(EngineDead):
        run_to_end(core)


def test_many_poisons_one_after_the_other_do_not_make_the_device_broken() -> None:
    core, _ = faulty_core(lambda plan: any(request_id.startswith("poison") for request_id in plan.request_ids))
    for number in range(3 * MAX_FAILURES_IN_A_ROW):
        core.add(make_request([number, 1], f"poison-{number}", max_tokens=3))
        (good,) = requests = [make_request([number, 2], f"good-{number}", max_tokens=3)]
        core.add(good)
        assert_only_these_failed(core, requests, run_to_end(core))


# --- a request that could never run


@pytest.mark.parametrize("length", [0, 128, 129, 10_000])
def test_a_prompt_that_can_never_run_ends_with_an_error_and_blocks_nobody(length: int) -> None:
    core = make_core(max_model_len=128)
    core.add(make_request([1] * length, "impossible"))
    good = make_request(range(9), "good", max_tokens=5)
    core.add(good)
    outputs = run_to_end(core)
    (end,) = outputs["impossible"]
    assert end.finish_reason is FinishReason.ERROR
    assert f"{length} tokens" in (end.error or "")
    assert "127" in (end.error or "")
    assert "impossible" not in simulated(core).computed
    assert_only_these_failed(core, [good], outputs)


def test_the_end_of_an_impossible_request_is_told_when_there_is_nothing_else_to_do() -> None:
    core = make_core(max_model_len=128)
    core.add(make_request([1] * 200, "impossible"))
    assert core.has_work
    (end,) = core.step().outputs
    assert end.request_id == "impossible"
    assert_nothing_left(core)


# --- everything together


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_requests=st.integers(1, 16),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    num_blocks=st.sampled_from([12, 40, 256]),
    prefix_caching=st.booleans(),
)
def test_exactly_the_poisons_end_whatever_the_crowd_and_the_memory(
    seed: int, num_requests: int, max_num_seqs: int, num_blocks: int, prefix_caching: bool
) -> None:
    draw = random.Random(seed)
    requests = [
        make_request([draw.randrange(3)] * draw.randint(1, 20), f"r{i}", max_tokens=draw.randint(1, 20))
        for i in range(num_requests)
    ]
    poisons = {request.request_id for request in requests if draw.random() < 0.15}
    poisons = set(sorted(poisons)[: MAX_FAILURES_IN_A_ROW - 1])
    core, _ = faulty_core(
        lambda plan: not poisons.isdisjoint(plan.request_ids),
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=44,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw.choice([16, 64]),
        enable_prefix_caching=prefix_caching,
    )
    for request in requests:
        core.add(request)
    assert_only_these_failed(core, requests, run_to_end(core, 5000), poisons)
