"""The prompts of an encoder are never cut, whatever else a step has, and all of them are computed."""

from __future__ import annotations

import random

import pytest

from engine.config import EngineConfig
from engine.messages import ModelFacts
from engine.plan import ModelRunnerOutput
from tests.engine.helpers import make_request, make_scheduler


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_computed_in_one_step_within_the_budget(seed: int) -> None:
    generator, facts = random.Random(seed), ModelFacts(is_encoder=True)
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        eos_token_ids=(),
        facts=facts,
        enable_prefix_caching=False,
    )
    scheduler = make_scheduler(config, 8, 64)
    lengths = {str(number): generator.choice([1, 2, 30, 63, 64]) for number in range(60)}
    for name, length in lengths.items():
        scheduler.add(make_request([7] * length, name, max_tokens=0))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.total_num_scheduled_tokens <= 64
        for name, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            assert num_tokens == lengths.pop(name)
        tokens = [[0] for _ in plan.request_ids]
        scheduler.update(plan, ModelRunnerOutput(sampled_token_ids=tokens, logprobs={}))
    assert not lengths
    scheduler.check_integrity()
