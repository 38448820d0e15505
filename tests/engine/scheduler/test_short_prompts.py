"""A long prompt does not hold up short ones, and short ones do not hold it up either."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest
from engine.scheduler.admission import MAX_OVERTAKEN
from tests.engine.helpers import assert_nothing_left, batches, make_core, make_request, run_to_end

BUDGET = 32
_prompts = count(1)


def prompt(length: int, name: str | None = None, **options: object) -> EngineCoreRequest:
    """A request whose prompt no other has."""
    number = next(_prompts)
    token_ids = [number % 1000, *(number * position % 1000 for position in range(1, length))]
    return make_request(token_ids, name, **{"max_tokens": 2, **options})  # type: ignore[arg-type]


def core_for_long(**options: int) -> EngineCore:
    sizes = {"num_blocks": 1024, "max_model_len": 1024, "max_num_batched_tokens": BUDGET, "max_num_seqs": 8}
    return make_core(**(sizes | options))  # type: ignore[arg-type]


def steps_to_start(core: EngineCore, name: str) -> int:
    """Return the number of steps until a request has its first token."""
    for number in range(1, 1000):
        if any(output.request_id == name and output.new_token_ids for output in core.step().outputs):
            return number
    raise AssertionError(f"{name} has no token after 1000 steps")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_waits_for_no_long_one(depth: int) -> None:
    core = core_for_long(pipeline_depth=depth)
    core.add(prompt(900, "long"))
    core.step()
    core.add(prompt(BUDGET // 4, "short"))
    assert steps_to_start(core, "short") <= 1 + depth
    core.add(prompt(4 * BUDGET, "longer than a step"))
    core.add(prompt(BUDGET // 4, "short again"))
    assert steps_to_start(core, "short again") <= 2 + depth, "nor for one in between"
    run_to_end(core)
    assert_nothing_left(core)


def test_a_conversation_counts_by_what_is_not_in_the_cache() -> None:
    core = core_for_long()
    history = [*range(500)]
    core.add(make_request(history, "turn", max_tokens=1))
    run_to_end(core)
    core.add(prompt(900, "long"))
    core.step()
    core.add(make_request([*history, 1, 2, 3], "next turn", max_tokens=1))
    assert steps_to_start(core, "next turn") == 1


def test_the_long_prompt_has_at_least_half_and_all_that_nobody_else_needs() -> None:
    core = core_for_long()
    core.add(prompt(900, "long"))
    core.step()
    for _ in range(20):
        core.add(prompt(12))
        core.step()
    chunks = [batch["long"] for batch in batches(core)]
    assert chunks[0] == BUDGET
    assert min(chunks) >= BUDGET // 2
    assert sum(chunk == BUDGET for chunk in chunks) == 1
    run_to_end(core)
    assert batches(core)[-5] == {"long": BUDGET}, "once it is alone again"


def test_prompts_of_one_length_are_computed_in_the_order_of_their_arrival() -> None:
    core = core_for_long()
    for number in range(4):
        core.add(prompt(200, f"prompt-{number}"))
    ends = [steps_to_start(core, f"prompt-{number}") for number in range(4)]
    assert max(ends) <= 200 // BUDGET + 2


def test_short_ones_overtake_a_long_one_only_so_often_for_the_only_slot() -> None:
    core = core_for_long(max_num_seqs=2)
    core.add(prompt(1000, "long", max_tokens=1))
    core.step()
    core.add(prompt(1000, "waits", max_tokens=1))
    overtook = 0
    while "waits" not in core.scheduler.running:
        while len(core.scheduler.waiting) < 3:
            core.add(prompt(8, max_tokens=1))
        core.step()
        overtook += sum(name.startswith("request") for name in batches(core)[-1])
    assert overtook == MAX_OVERTAKEN
    run_to_end(core)


def test_a_short_prompt_of_another_tenant_takes_no_slot_that_a_long_one_waits_for() -> None:
    core = core_for_long(max_num_seqs=2)
    core.add(prompt(900, "long", tenant="a"))
    core.step()
    core.add(prompt(900, "waits", tenant="a"))
    core.add(prompt(8, "worse", tenant="a", priority=1))
    core.step()
    assert set(core.scheduler.running) == {"long"}, "none of a worse priority before it"
    run_to_end(core)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(2, 8), depth=st.sampled_from([1, 2]))
def test_whatever_comes_the_first_prompt_advances_and_no_budget_is_left_unused(
    seed: int, slots: int, depth: int
) -> None:
    draw = random.Random(seed)
    core = core_for_long(max_num_seqs=slots, pipeline_depth=depth)
    num_left = 12
    only_decoded = [False, False]  # the latest steps
    while core.has_work or num_left:
        while num_left and draw.random() < 0.4:
            core.add(prompt(draw.choice([3, 10, 40, 300]), tenant=draw.choice("ab"), max_tokens=draw.randint(1, 3)))
            num_left -= 1
        behind = {
            request.request_id: request.num_tokens - request.num_computed_tokens
            for request in core.scheduler.running.values()
        }
        first, missing = next(((each, number) for each, number in behind.items() if number > 1), ("", 0))
        num_before = len(batches(core))
        core.step()
        core.scheduler.check_integrity()
        is_preempted = first not in core.scheduler.running  # for a tenant that has less than its share
        if depth == 1 and missing > BUDGET and not is_preempted and len(batches(core)) > num_before:
            batch = batches(core)[-1]
            num_decodes = sum(number == 1 for number in behind.values())
            only_decoded.append(first not in batch)
            if only_decoded[-1]:
                assert num_decodes, "only for the sake of running streams"
                assert not any(only_decoded[-3:-1]), "at most one step in three"
                continue
            assert sum(batch.values()) == BUDGET
            assert batch[first] >= (BUDGET - num_decodes) // 2
    assert_nothing_left(core)
