"""Whatever arrives, leaves and fails in whatever order: memory is never mixed up, and everyone is served.

The simulated executor checks every plan and every KV read (`PlanViolation`); the machine below checks the accounts
after every step, and at the end that each request gave exactly what its sequence alone determines.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.errors import StepAbandoned
from engine.frontend.input_processor import InputProcessor
from engine.messages import EngineCoreRequest, FinishReason, ModelFacts
from engine.plan import SchedulerOutput, most_blocks, most_in_window, owned
from engine.scheduler.request import RequestStatus
from tests.engine.checked_executor import CheckedExecutor, PlanViolation
from tests.engine.helpers import assert_nothing_left, byte_level_tokenizer, make_request
from tests.engine.queueing_executor import QueueingExecutor
from tests.engine.simulated_tier import SimulatedTier
from tests.engine.simulated_tokens import expected_output
from tests.engine.stories import explore

VOCAB_SIZE = 50
TOKENIZER = byte_level_tokenizer()
EOS = (5,)

_seen: Counter[str] = Counter()  # what the runs went through, so that the test knows that it tested something


class EngineMachine(RuleBasedStateMachine):
    """One engine core with drawn limits; the rules are what clients and devices can do to it.

    Hypothesis draws the events and their order; what a crowd of requests looks like comes from a seeded generator,
    whose even spread puts far more pressure on blocks and running slots than drawing every field would.
    """

    @initialize(
        block_size=st.integers(1, 16),
        num_tokens=st.integers(24, 64),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 24),
        enable_prefix_caching=st.booleans(),
        fast=st.sampled_from([None, 0.0, 0.0, 0.5]),
        max_sampled_tokens=st.sampled_from([1, 1, 2, 5]),
        windows=st.one_of(
            st.just((None,)),
            st.lists(st.sampled_from([None, 1, 2, 5, 13, 40, 1000]), min_size=1, max_size=3).map(tuple),
        ),
        blocks_per_chunk=st.sampled_from([None, 1, 1, 2, 3]),
        num_stages=st.sampled_from([1, 1, 1, 2, 3]),
        num_checkpoints=st.sampled_from([None, None, None, 0, 1, 3, 20]),
    )
    def start(
        self,
        block_size: int,
        num_tokens: int,
        max_num_seqs: int,
        spare_budget: int,
        enable_prefix_caching: bool,
        fast: float | None,
        max_sampled_tokens: int,
        windows: tuple[int | None, ...],
        blocks_per_chunk: int | None,
        num_stages: int,
        num_checkpoints: int | None,
    ) -> None:
        """`fast` is how quick a device with a queue is, planned for one step ahead; None is a device without one.
        `blocks_per_chunk` is of the tier beside the cache; None is no tier. `num_checkpoints` are of a model with
        states, which may be planned one step ahead and has none of the other things; None is a model without.

        One that may sample several tokens gives any number of them, also none.
        """
        if num_checkpoints is not None:
            max_sampled_tokens, windows, blocks_per_chunk, num_stages = 1, (None,), None, 1
        budget, depth = max_num_seqs + spare_budget, 1 if fast is None else max(2, num_stages)
        num_stages = 1 if fast is None else num_stages
        # One request may need almost the whole pool, so several together must be preempted.
        self.max_model_len = num_tokens - num_tokens // 4
        num_blocks = most_blocks(windows, block_size, self.max_model_len, budget * min(depth, 2))
        num_blocks += num_blocks // 4 * bool(block_size % 2)
        config = EngineConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_sampled_tokens=max_sampled_tokens,
            enable_prefix_caching=enable_prefix_caching,
            eos_token_ids=EOS,
            facts=ModelFacts(
                kv_windows=windows, state_bytes=int(num_checkpoints is not None), num_checkpoints=num_checkpoints or 0
            ),
            state_checkpoint_interval=num_tokens // 4,
            pipeline_depth=depth,
            num_stages=num_stages,
        )
        make_executor = CheckedExecutor if fast is None else partial(QueueingExecutor, fast=fast)
        self.executor = make_executor(
            num_blocks,
            block_size,
            VOCAB_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            windows=windows,
            num_checkpoints=num_checkpoints,
            before_step=self.before_step,
            how_many=None if max_sampled_tokens == 1 else partial(random.Random(0).randint, 0),
        )
        self.writers: dict[int, str] = {}  # the tenant whose tokens a block holds
        self.tier: SimulatedTier | None = None
        if blocks_per_chunk is not None and enable_prefix_caching:
            seed = block_size + num_tokens
            self.tier = SimulatedTier(
                self.executor, self.writers, blocks_per_chunk=blocks_per_chunk, seed=seed, before_copy=self.check_plans
            )
            self.executor.tier = self.tier
        self.core = EngineCore(config, self.executor)
        self.inputs = InputProcessor(TOKENIZER, vocab_size=VOCAB_SIZE, max_model_len=self.max_model_len, seed=0)
        self.children: dict[str, EngineCoreRequest] = {}
        self.gained: dict[str, list[int]] = {}
        self.finishes: dict[str, tuple[FinishReason, int | str | None]] = {}
        self.left: set[str] = set()  # ended from outside
        self.never_to_run: set[str] = set()
        self.broken: Counter[str] = Counter()  # how many steps that raised each was in
        self.poison: set[str] = set()  # make every step raise that they are in
        self.break_next_step = False
        self.abandon_next_step = False
        self.num_plans_checked = 0
        self.failed_step = 0
        self.had_two_tenants = False  # before the latest step

    def before_step(self, plan: SchedulerOutput) -> None:
        if self.abandon_next_step and plan.request_ids:
            self.abandon_next_step = False
            _seen[f"abandoned at depth {self.core.config.pipeline_depth}"] += 1
            self.failed_step = plan.step
            raise StepAbandoned("so it seemed")
        if (self.break_next_step and plan.request_ids) or not self.poison.isdisjoint(plan.request_ids):
            self.break_next_step = False
            self.broken.update(plan.request_ids)
            self.failed_step = plan.step
            raise RuntimeError("the device broke")

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
    def arrive(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        if self.tier is not None and draw.random() < 0.5:
            self.core.scheduler.kv.reset()  # as after a restart
        for _ in range(count):
            # Prompts begin alike: three families, cut at any length, sometimes with an ending of their own.
            family = draw.randrange(3)
            length = draw.randrange(1, self.max_model_len - 1)
            prompt = [(family + position * (family + 1)) % VOCAB_SIZE for position in range(length)]
            prompt[length // 2 :] = [draw.randrange(VOCAB_SIZE)] * (draw.random() < 0.3) + prompt[length // 2 :]
            max_tokens = draw.randint(1, self.max_model_len - len(prompt))
            request = make_request(
                prompt,
                priority=draw.choice([0, 0, 0, -1, 2]),
                tenant=draw.choice(["", "", "blue"]),
                n=draw.choice([1, 1, 1, 3]),
                max_tokens=draw.choice([max_tokens, None]),
                min_tokens=draw.randint(0, max_tokens),
                stop_token_ids=draw.choice([(), (1,), (2, 7, 9, 14)]),
                ignore_eos=draw.random() < 0.5,
                temperature=draw.choice([0.0, 1.0]),
            )
            for child in self.inputs.process([request])[0]:
                self.children[child.request_id] = child
                self.gained[child.request_id] = []
                self.core.add(child)

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP, FinishReason.TIMEOUT]))
    def leave(self, data: st.DataObject, reason: FinishReason) -> None:
        """In any state: waiting, prefilling, decoding, preempted, finished, gone before, never heard of."""
        ended = list(self.finishes)[-1:]
        loading = [each.request_id for each in self.core.scheduler.waiting if each.load is not None]
        living_ids = loading or [*self.core.scheduler.running, *self.core.scheduler.requests]
        request_id = data.draw(st.sampled_from([*living_ids, *ended, "nobody"]))
        living = self.core.scheduler.requests.get(request_id)
        if living is not None:
            self.left.add(request_id)
            _seen[f"left while {living.status.name}"] += 1
            _seen["left while loading"] += living.load is not None
            if living.status is RequestStatus.WAITING:
                assert request_id not in self.executor.computed
                self.never_to_run.add(request_id)
        self.core.finish_request(request_id, reason)
        assert request_id not in self.core.scheduler.requests

    @precondition(lambda self: self.core.scheduler.requests)
    @rule()
    def break_device(self) -> None:
        self.break_next_step = True

    @precondition(lambda self: self.core.scheduler.requests)
    @rule()
    def abandon_step(self) -> None:
        """It happens only to steps whose requests are all leaving, but nothing is wrong if they stay."""
        self.abandon_next_step = True

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def poison_one(self, data: st.DataObject) -> None:
        self.poison.add(data.draw(st.sampled_from(list(self.core.scheduler.requests))))

    @precondition(lambda self: self.tier is not None)
    @rule(seed=st.integers(0, 2**32 - 1))
    def forget(self, seed: int) -> None:
        """Everything is stored, and nothing found in memory any more, as after a restart. Then somebody comes back."""
        for _ in range(8):
            self.core.prepare()
        self.core.scheduler.kv.reset()
        self.arrive(seed, 2)
        self.step()

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.had_two_tenants |= len(self.core.scheduler.shares.num_living) > 1
        try:
            batch = self.core.step()
        except PlanViolation as violation:
            raise AssertionError(str(violation)) from violation
        self.core.scheduler.check_integrity()
        self.check_windows()
        self.check_stages()
        self.check_plans()
        plan = self.executor.plans[-1]
        is_ahead = self.core.config.pipeline_depth > 1  # then several plans may count in one step's statistics
        if batch.stats.num_preemptions and plan.step != self.failed_step and not (self.had_two_tenants or is_ahead):
            # Blocks are taken from one request for those before it, never for newcomers of the same tenant.
            assert not plan.new_requests or self.core._quarantine.suspects is not None
        self.had_two_tenants = len(self.core.scheduler.shares.num_living) > 1
        for output in batch.outputs:
            assert output.request_id not in self.left
            assert output.request_id not in self.finishes
            self.gained[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finishes[output.request_id] = (output.finish_reason, output.stop_reason)
        _seen["preemptions"] += batch.stats.num_preemptions
        _seen["preemptions a step ahead"] += batch.stats.num_preemptions if is_ahead else 0
        _seen["prefix hits"] += batch.stats.prefix_cache_hits
        if batch.stats.checkpoints is not None:
            _seen["requests that began from a checkpoint"] += bool(batch.stats.checkpoints.hits)
        _seen["preemptions with states"] += batch.stats.num_preemptions * bool(self.core.config.facts.state_bytes)
        if len(set(self.executor.kv_windows)) > 1:
            _seen["preemptions with windows"] += batch.stats.num_preemptions
            _seen["prefix hits with windows"] += batch.stats.prefix_cache_hits

    def check_windows(self) -> None:
        """Nobody owns more of a group with a window than the steps at hand, and drafts of the one before, need.

        And one block, as a block that has left the window is given back when another is full or wanted.
        """
        latest: Counter[str] = Counter()
        for plan in self.executor.plans[-1 - self.core.config.pipeline_depth :]:
            latest.update(dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)))
        windows = self.executor.kv_windows
        for request_id, request in self.core.scheduler.running.items():
            for group, window in enumerate(windows):
                if window is not None:
                    num_owned = len(owned(request.block_ids[group :: len(windows)]))
                    assert num_owned <= most_in_window(window, self.executor.block_size, latest[request_id]) + 1

    def check_stages(self) -> None:
        """Of several stages, each works on other requests: none is in a plan whose latest token is not known."""
        steps = list(self.core.scheduler._in_flight._steps)
        if self.core.config.num_stages == 1:
            return
        waits_for_its_token: set[str] = set()
        for step in steps:
            assert waits_for_its_token.isdisjoint(step.num_tokens)
            waits_for_its_token.update(each for each in step.num_tokens if step.prefills.get(each, 1))
        for earlier, later in pairwise(steps):
            _seen["chunks that follow each other"] += not set(earlier.num_tokens).isdisjoint(later.num_tokens)

    def check_plans(self) -> None:
        for plan in self.executor.plans[self.num_plans_checked :]:
            self.check_tenants(plan)
            _seen["several tokens a step"] += max(plan.num_sampled_tokens, default=0) > 1
        self.num_plans_checked = len(self.executor.plans)

    def check_tenants(self, plan: SchedulerOutput) -> None:
        """A block's content is used by the tenant that wrote it, and by nobody else."""
        for new in plan.new_requests:
            tenant = self.children[new.request_id].tenant
            num_shared = new.num_computed_tokens // self.executor.block_size * len(self.executor.kv_windows)
            assert all(self.writers[block_id] == tenant for block_id in owned(new.block_ids[:num_shared]))
            self.writers.update(dict.fromkeys(new.block_ids[num_shared:], tenant))
        for request_id, block_ids in plan.new_block_ids.items():
            self.writers.update(dict.fromkeys(block_ids, self.children[request_id].tenant))

    @invariant()
    def tables_agree(self) -> None:
        self.core.scheduler.check_integrity()
        assert not self.never_to_run & set(self.executor.computed)
        assert len(self.core.scheduler.running) <= self.core.config.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # Nobody starves: even if every request had to be computed anew for each token of its own output, twice over.
        limit = 16 * self.max_model_len * (len(self.children) + 1)
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert_nothing_left(self.core)
        if self.tier is not None:
            _seen.update(self.tier.seen)
        if isinstance(self.executor, QueueingExecutor):
            _seen["two steps in flight"] += self.executor.most_in_flight == 2
            _seen["three stages at work"] += self.executor.most_in_flight == 3
            assert self.executor.most_in_flight <= self.core.config.pipeline_depth
        for request_id, child in self.children.items():
            expected = expected_output(
                child.prompt_token_ids,
                child.sampling,
                vocab_size=VOCAB_SIZE,
                max_model_len=self.max_model_len,
                eos_token_ids=EOS,
            )
            gained = self.gained[request_id]
            assert gained == expected.token_ids[: len(gained)]
            finish = self.finishes.get(request_id)
            if finish == (FinishReason.ERROR, None):
                # Guilty: it failed alone after it had failed once, by its own fault or because the device broke twice.
                assert self.broken[request_id] >= 2
                _seen["found guilty"] += request_id in self.poison
            elif request_id not in self.left:
                assert request_id not in self.poison or not self.broken[request_id]
                assert gained == expected.token_ids
                assert self.finishes[request_id] == (expected.finish_reason, expected.stop_reason)
                _seen[f"finished {expected.finish_reason}"] += 1


EVENTS = [
    "preemptions",
    "preemptions a step ahead",
    "two steps in flight",
    "three stages at work",
    "chunks that follow each other",
    "several tokens a step",
    "abandoned at depth 1",
    "abandoned at depth 2",
    "prefix hits",
    "requests that began from a checkpoint",
    "preemptions with states",
    "preemptions with windows",
    "prefix hits with windows",
    "stores",
    "loads",
    "loads cut short",
    "chunks loaded",
    "chunks that could not be had",
    "found guilty",
    "left while WAITING",
    "left while RUNNING",
    "finished stop",
    "finished length",
]


@pytest.mark.slow
@pytest.mark.seconds
def test_every_request_gets_its_own_tokens_whatever_happens_to_the_others() -> None:
    explore(EngineMachine, _seen, EVENTS, max_examples=60)


@pytest.mark.storm
def test_every_request_gets_its_own_tokens_in_thousands_of_stories() -> None:
    explore(EngineMachine, _seen, EVENTS, max_examples=5000)
