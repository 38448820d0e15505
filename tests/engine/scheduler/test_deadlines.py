"""What is out of time ends at once, and what cannot come in time is never begun."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.core.core import EngineCore
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.scheduler.request_table import Deadlines
from engine.simulation.counting import VirtualClock
from tests.engine.helpers import assert_nothing_left, make_core, make_request, run_to_end, simulated, tokens_of
from tests.engine.simulated_tokens import expected_output


class Clock(VirtualClock):
    """Time that passes when a step runs: `seconds_per_token` of it, or what the test sets."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.seconds_per_token = 0.01
        self.hold_up = 0.0  # the next step takes this much longer

    def before_step(self, plan: SchedulerOutput) -> None:
        self.sleep(plan.total_num_scheduled_tokens * self.seconds_per_token + self.hold_up)
        self.hold_up = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def core_with(clock: Clock, **options: Any) -> EngineCore:
    return make_core(before_step=clock.before_step, clock=clock, **options)


def request(
    name: str,
    clock: Clock,
    *,
    prompt: int = 8,
    max_tokens: int = 20,
    within: float | None = None,
    first_token_within: float | None = None,
) -> EngineCoreRequest:
    token_ids = [ord(name[0]), *range(prompt - 1)]
    return replace(
        make_request(token_ids, name, max_tokens=max_tokens),
        deadline=None if within is None else clock.now + within,
        first_token_deadline=None if first_token_within is None else clock.now + first_token_within,
    )


def ends(outputs: dict[str, list[EngineCoreOutput]]) -> dict[str, FinishReason | None]:
    return {request_id: each[-1].finish_reason for request_id, each in outputs.items()}


def expected_tokens(core: EngineCore, each: EngineCoreRequest) -> list[int]:
    return expected_output(
        each.prompt_token_ids, each.sampling, vocab_size=1000, max_model_len=core.config.max_model_len
    ).token_ids


# --- waiting


@pytest.mark.parametrize("kind", ["within", "first_token_within"])
def test_a_request_that_expires_in_the_queue_is_never_prefilled(clock: Clock, kind: str) -> None:
    core = core_with(clock, max_num_seqs=1)
    core.add(request("runs", clock, max_tokens=50))
    core.add(request("expires", clock, **dict[str, Any]({kind: 0.2})))
    outputs = run_to_end(core)
    assert ends(outputs) == {"runs": FinishReason.LENGTH, "expires": FinishReason.TIMEOUT}
    (end,) = outputs["expires"]
    assert end.new_token_ids == []
    assert "expires" not in simulated(core).computed
    assert_nothing_left(core)


def test_the_end_comes_with_the_first_step_after_the_deadline(clock: Clock) -> None:
    core = core_with(clock, max_num_seqs=1)
    core.add(request("runs", clock, max_tokens=50))
    late = request("expires", clock, within=0.2)
    core.add(late)
    assert late.deadline is not None
    while clock.now < late.deadline:
        assert not any(output.finish_reason for output in core.step().outputs)
    (end,) = (output for output in core.step().outputs if output.finish_reason)
    assert (end.request_id, end.finish_reason) == ("expires", FinishReason.TIMEOUT)


def test_what_cannot_make_its_first_token_at_the_measured_speed_is_given_up_before_prefill(clock: Clock) -> None:
    core = core_with(clock, max_num_seqs=4)
    for number in range(3):  # which tell what a token costs
        core.add(request(f"{number}-measured", clock, prompt=32, max_tokens=1))
        run_to_end(core)
    core.add(request("runs", clock, prompt=32, max_tokens=60))
    for _ in range(5):
        core.step()
    # 100 tokens take a second.
    core.add(request("unmeetable", clock, prompt=100, first_token_within=0.5))
    core.add(request("late as a whole", clock, prompt=100, within=0.5))
    core.add(request("possible", clock, prompt=100, first_token_within=3.0))
    ended = [output.request_id for output in core.step().outputs if output.finish_reason]
    assert ended == ["unmeetable", "late as a whole"]  # while there is time to tell the client
    outputs = run_to_end(core)
    assert ends(outputs) == {"runs": FinishReason.LENGTH, "possible": FinishReason.LENGTH}
    assert not {"unmeetable", "late as a whole"} & set(simulated(core).computed)
    assert_nothing_left(core)


def test_what_the_prefix_cache_provides_takes_no_time(clock: Clock) -> None:
    core = core_with(clock, max_num_seqs=4)
    core.add(request("cached", clock, prompt=100, max_tokens=1))
    run_to_end(core)
    core.add(request("runs", clock, prompt=32, max_tokens=60))
    core.step()
    core.add(request("c again", clock, prompt=100, first_token_within=0.5))
    assert ends(run_to_end(core))["c again"] is FinishReason.LENGTH


def test_nothing_is_given_up_before_a_speed_was_measured(clock: Clock) -> None:
    core = core_with(clock)
    core.add(request("first", clock, prompt=20, first_token_within=0.3))
    assert ends(run_to_end(core)) == {"first": FinishReason.LENGTH}


def test_a_step_that_was_held_up_does_not_make_every_deadline_unmeetable(clock: Clock) -> None:
    core = core_with(clock, max_num_seqs=4)
    for number in range(3):
        core.add(request(f"{number} warms up", clock, max_tokens=2, prompt=20))
        run_to_end(core)
    core.add(request("runs", clock, max_tokens=60, prompt=20))
    clock.hold_up = 100.0  # a laptop's lid, a paused virtual machine
    core.step()
    core.add(request("possible", clock, prompt=50, first_token_within=2.0))
    assert ends(run_to_end(core)) == {"runs": FinishReason.LENGTH, "possible": FinishReason.LENGTH}


def test_an_engine_that_was_slow_at_first_finds_out_that_it_is_not(clock: Clock) -> None:
    core = core_with(clock)
    clock.hold_up = 100.0
    core.add(request("a", clock, prompt=20, max_tokens=2))
    run_to_end(core)
    core.add(request("b", clock, prompt=60, first_token_within=2.0))
    assert ends(run_to_end(core)) == {"b": FinishReason.LENGTH}


# --- running


@pytest.mark.parametrize("kind", ["within", "first_token_within"])
def test_a_request_that_expires_in_its_prefill_frees_its_blocks_at_the_next_step(clock: Clock, kind: str) -> None:
    core = core_with(clock, max_num_batched_tokens=10)
    core.add(request("expires", clock, prompt=100, **dict[str, Any]({kind: 0.25})))
    for _ in range(3):
        assert not core.step().outputs[-1].finish_reason
    assert core.scheduler.kv.usage > 0
    (end,) = core.step().outputs
    assert (end.finish_reason, end.new_token_ids) == (FinishReason.TIMEOUT, [])
    assert core.scheduler.kv.usage == 0.0
    assert simulated(core).computed["expires"] == 30
    core.step()
    assert_nothing_left(core)


def test_a_stream_that_expires_ends_after_the_tokens_it_got_and_others_go_on(clock: Clock) -> None:
    core = core_with(clock)
    other = request("other", clock, max_tokens=40)
    expiring = request("expires", clock, max_tokens=40, within=0.5)
    core.add(expiring)
    core.add(other)
    outputs = run_to_end(core)
    assert ends(outputs) == {"other": FinishReason.LENGTH, "expires": FinishReason.TIMEOUT}
    tokens = tokens_of(outputs["expires"])
    assert 5 < len(tokens) < 40
    assert tokens == expected_tokens(core, expiring)[: len(tokens)]
    assert tokens_of(outputs["other"]) == expected_tokens(core, other)
    assert_nothing_left(core)


def test_the_end_of_an_expired_stream_still_tells_what_the_cache_provided(clock: Clock) -> None:
    core = core_with(clock)
    core.add(request("a", clock, prompt=20, max_tokens=1))
    run_to_end(core)
    core.add(request("a again", clock, prompt=20, within=0.2))
    outputs = run_to_end(core)["a again"]
    assert outputs[-1].finish_reason is FinishReason.TIMEOUT
    assert {output.num_cached_tokens for output in outputs if output.new_token_ids or output.finish_reason} == {16}


def test_a_request_with_output_has_no_deadline_for_its_first_token_any_more(clock: Clock) -> None:
    core = core_with(clock)
    each = request("prompt", clock, max_tokens=60, first_token_within=0.2)
    core.add(each)
    outputs = run_to_end(core)
    assert clock.now > 1000.2
    assert ends(outputs) == {"prompt": FinishReason.LENGTH}
    assert tokens_of(outputs["prompt"]) == expected_tokens(core, each)


def test_a_preempted_request_with_output_has_none_either_but_still_one_for_its_end(clock: Clock) -> None:
    core = core_with(clock, num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=2)
    core.add(request("a", clock, prompt=7, max_tokens=16))
    core.add(request("b", clock, prompt=7, max_tokens=16, first_token_within=0.2))
    core.add(request("c", clock, prompt=7, max_tokens=16, first_token_within=60.0, within=0.4))
    outputs = run_to_end(core)
    assert ends(outputs) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH, "c": FinishReason.TIMEOUT}
    assert_nothing_left(core)


def test_a_deadline_in_the_past_costs_nothing(clock: Clock) -> None:
    core = core_with(clock)
    core.add(request("late", clock, within=-1.0))
    assert ends(run_to_end(core)) == {"late": FinishReason.TIMEOUT}
    assert not simulated(core).computed
    assert_nothing_left(core)


def test_who_ends_before_the_deadline_is_not_ended_again(clock: Clock) -> None:
    core = core_with(clock)
    core.add(request("in time", clock, max_tokens=3, within=5.0, first_token_within=4.0))
    core.add(request("aborted", clock, max_tokens=30, within=5.0, first_token_within=4.0))
    core.step()
    core.finish_request("aborted", FinishReason.ABORT)
    outputs = run_to_end(core)
    clock.now += 10
    core.add(request("next", clock, max_tokens=3))
    outputs |= run_to_end(core)
    assert ends(outputs) == {"in time": FinishReason.LENGTH, "next": FinishReason.LENGTH}


# --- memory


@pytest.mark.seconds
def test_ten_thousand_requests_that_end_in_time_leave_nothing_behind(clock: Clock) -> None:
    clock.seconds_per_token = 0.0
    core = core_with(clock, max_num_seqs=8)
    longest = 0
    deadlines = core.scheduler._deadlines
    assert isinstance(deadlines, Deadlines)
    for number in range(10_000):
        core.add(request(f"{number}", clock, prompt=1, max_tokens=1, within=3600.0, first_token_within=600.0))
        if number % 8 == 7:
            core.step()
            simulated(core).plans.clear()
            longest = max(longest, len(deadlines._heap))
    run_to_end(core)
    assert_nothing_left(core)
    assert longest <= 4 * 8 + 64 + 2 * 8
    core.add(request("z", clock, max_tokens=1))
    run_to_end(core)
    assert len(deadlines._heap) <= 64
