"""The scheduler plans steady requests by copying a table, and every request gets the same as without the table."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from engine.errors import StepAbandoned
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.scheduler import scheduler
from engine.scheduler.request import Request
from tests.engine.helpers import make_core, make_request, simulated
from tests.engine.scheduler.test_scheduler_properties import EVENTS, EngineMachine, _seen
from tests.engine.stories import explore

NEVER = 10**9
EOS = 5


def history(seed: int, depth: int) -> tuple[list[Any], list[int]]:
    """Run a random story. Return what each step planned and sent, and the number of steady requests in each step.

    If blocks run out or a step is abandoned, the order of requests in a plan decides between two equal requests. With
    two steps in flight that order may differ, so at depth 2 blocks suffice, and requests are only aborted.
    """
    draw = random.Random(seed)
    core = make_core(
        num_blocks=draw.choice([120, 4096]) if depth == 1 else 4096,
        block_size=draw.choice([4, 16]),
        vocab_size=60,
        max_model_len=96,
        max_num_seqs=24,
        max_num_batched_tokens=draw.choice([64, 512]),
        pipeline_depth=depth,
        eos_token_ids=(EOS,),
        clock=lambda: 0.0,
    )
    executor = simulated(core)
    abandons = False

    def abandon(plan: SchedulerOutput) -> None:
        nonlocal abandons
        if abandons and plan.request_ids:
            abandons = False
            raise StepAbandoned("so it seemed")

    executor.before_step = abandon
    story: list[Any] = []
    num_steady: list[int] = []
    requests: list[EngineCoreRequest] = []
    for step in range(400):
        if step >= 100 and not core.has_work:
            break
        if step < 100:
            for _ in range(draw.choice([0, 0, 0, 1, 2])):
                requests.append(
                    make_request(
                        [draw.randrange(60) for _ in range(draw.randint(1, 40))],
                        request_id=f"request-{len(requests)}",
                        tenant=draw.choice(["", "blue"]),
                        max_tokens=draw.randint(1, 50),
                        ignore_eos=draw.random() < 0.7,
                        stop_token_ids=draw.choice([(), (), (9, 11)]),
                    )
                )
                core.add(requests[-1])
            if requests and draw.random() < 0.1:
                core.finish_request(draw.choice(requests).request_id, FinishReason.ABORT)
            abandons |= depth == 1 and draw.random() < 0.05
        known = len(executor.plans)
        batch = core.step()
        core.scheduler.check_integrity()
        num_steady.append(len(core.scheduler._table.steady.requests))
        for plan in executor.plans[known:]:
            given = zip(plan.request_ids, plan.num_scheduled_tokens, plan.num_sampled_tokens, strict=True)
            blocks = {request_id: len(block_ids) for request_id, block_ids in plan.new_block_ids.items()}
            new = [(each.request_id, each.num_computed_tokens, len(each.block_ids)) for each in plan.new_requests]
            story.append((sorted(given), blocks, new, sorted(plan.removed_request_ids)))
        story.append(sorted((o.request_id, o.new_token_ids, str(o.finish_reason)) for o in batch.outputs))
        story.append((batch.stats.num_preemptions, batch.stats.kv_cache_usage, core.scheduler.shares.snapshot(9)))
    assert not core.has_work
    return story, num_steady


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_steady_requests_are_planned_and_answered_as_all_others_are(
    seed: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MANY", NEVER)
    plainly, num_steady = history(seed, depth)
    assert not any(num_steady)
    monkeypatch.setattr(scheduler, "MANY", 1)
    with_steady, num_steady = history(seed, depth)
    assert max(num_steady) > 10
    assert with_steady == plainly


@pytest.mark.slow
@pytest.mark.seconds
def test_steady_requests_get_their_own_tokens_whatever_happens_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MANY", 1)
    explore(EngineMachine, _seen, EVENTS, max_examples=60)


def test_nothing_keeps_steady_requests_that_have_ended() -> None:
    core = make_core(max_num_seqs=24, max_model_len=200, clock=lambda: 0.0)
    for number in range(20):
        core.add(make_request([number + 1] * 8, f"steady-{number}", max_tokens=100))
    for _ in range(6):
        core.step()
    assert core.scheduler._table.steady.requests
    for name in list(core.scheduler.requests):
        core.finish_request(name, FinishReason.ABORT)
    while core.has_work:
        core.step()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Request and each.request_id.startswith("steady-")]
