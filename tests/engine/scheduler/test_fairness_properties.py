"""Whatever tenants do, each request is served and no limit is exceeded."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from engine.messages import EngineCoreRequest, FinishReason
from tests.engine.helpers import (
    assert_nothing_left,
    make_core,
)
from tests.engine.scheduler.test_fairness import expected_tokens, request_of, seats_held
from tests.engine.stories import explore

_seen: Counter[str] = Counter()


class TenantsMachine(RuleBasedStateMachine):
    """Tenants with weights, limits and priorities, in floods and trickles; clients leave as they like."""

    @initialize(num_slots=st.integers(1, 5), num_blocks=st.integers(12, 30), spare_budget=st.sampled_from([0, 4, 16]))
    def start(self, num_slots: int, num_blocks: int, spare_budget: int) -> None:
        self.core = make_core(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=40,
            max_num_seqs=num_slots,
            max_num_batched_tokens=num_slots + spare_budget,
        )
        self.limits = {"flood": 0, "heavy": 0, "limited": 1, "poor": 2}
        self.weights = {"flood": 1.0, "heavy": 5.0, "limited": 2.0, "poor": 0.01}
        self.requests: dict[str, EngineCoreRequest] = {}
        self.gained: dict[str, list[int]] = {}
        self.left: set[str] = set()

    @rule(tenant=st.sampled_from(["flood", "heavy", "limited", "poor"]), seed=st.integers(0, 999))
    def arrive(self, tenant: str, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(draw.choice([1, 3, 9])):
            request = request_of(
                tenant,
                prompt=draw.randint(1, 20),
                max_tokens=draw.randint(1, 19),
                weight=self.weights[tenant],
                max_running=self.limits[tenant],
                priority=draw.choice([0, 0, 0, 0, 1, -1000, draw.randint(-9, 9)]),
                precedence=draw.choice([0, 0, 1, -5]) if tenant == "heavy" else 0,
            )
            self.requests[request.request_id] = request
            self.gained[request.request_id] = []
            self.core.add(request)

    @rule(seed=st.integers(0, 999))
    def leave(self, seed: int) -> None:
        living = list(self.core.scheduler.requests)
        if living:
            request_id = random.Random(seed).choice(living)
            self.left.add(request_id)
            self.core.finish_request(request_id, FinishReason.ABORT)

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        outputs = self.core.step()
        _seen["preemptions"] += outputs.stats.num_preemptions
        for output in outputs.outputs:
            self.gained[output.request_id] += output.new_token_ids
        for tenant, held in seats_held(self.core).items():
            assert not self.limits[tenant] or held <= self.limits[tenant]
            _seen["at its limit"] += held == self.limits[tenant]

    @invariant()
    def books_balance(self) -> None:
        self.core.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(60 * (len(self.requests) + 1)):
            if not self.core.has_work:
                break
            self.step()
        assert_nothing_left(self.core)
        for request_id, request in self.requests.items():
            if request_id not in self.left:
                assert self.gained[request_id] == expected_tokens(self.core, request)


@pytest.mark.seconds
def test_whatever_tenants_do_each_request_is_served_and_no_limit_is_exceeded() -> None:
    explore(TenantsMachine, _seen, ["preemptions", "at its limit"], max_examples=20)


@pytest.mark.storm
def test_whatever_tenants_do_in_thousands_of_stories_each_request_is_served() -> None:
    explore(TenantsMachine, _seen, ["preemptions", "at its limit"], max_examples=2000)
