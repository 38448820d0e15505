"""The scheduler: which requests run in the next step, and for how many tokens.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens`, which catches up with its
`num_tokens`; a step gives every running request a part of the difference, under one token budget. A request that has
caught up samples one or several tokens, which puts it one token behind again: that is decoding. Chunked prefill, prefix
caching, resuming after a preemption and mixed batches all follow from this rule.

The order within a step: running requests that are one token behind, then running requests that are further behind (so
that no prefill delays a stream), then waiting requests (`engine/scheduler/admission.py`), by fair share of their
tenant, the tenant's own priority, and arrival (`engine/scheduler/waiting_queue.py`). There is one exception: if the
first prompt would take the whole budget, half of it goes to prompts at most half as long, running or waiting, the
shortest of a tenant first.

When blocks run out, the running request of the lowest rank (`engine/scheduler/admission.py`) is preempted: its blocks
are freed, and it is computed again later, mostly from the prefix cache. The lowest-ranked request is never preempted to
make room for itself: it keeps its blocks and waits. Ranks change within a step only when a request is preempted, so a
request that waited as the lowest is the next to be preempted, and the last one left has the whole pool, which always
fits one request of `max_model_len`. So at least one request always makes progress. A tenant that holds more than its
share of the running slots gives one up when a tenant that holds less than its share is waiting.

Rows of batches (`BATCH_PRECEDENCE`) get nothing of a step while another request lives. Those that run keep their
blocks, and give up running slots and blocks first. After a minute of that, one row at a time runs all the same.

The scheduler raises nothing because of one request: a faulty request ends alone. The EngineCore owns it, on the
engine's thread. It is deterministic: no clock, no randomness, no device.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from engine.config import EngineConfig
from engine.costs.table import StepBudget, StepLoad
from engine.executor import BlockTier
from engine.messages import EngineCoreOutput, EngineCoreRequest, EventKind, Refusal, SchedulerStats
from engine.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduler.admission import Admission, bystander, worst_ranked
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from engine.scheduler.request_table import Deadlines, RequestTable
from engine.scheduler.steps import PlanDraft
from engine.scheduler.tiers import Tiers
from engine.scheduler.waiting_queue import OUTPUT_TOKEN_COST
from engine.snapshot import WaitsFor
from engine.structured.matchers import TokenMatcher

logger = logging.getLogger(__name__)

MANY = 16  # running requests; with fewer, a separate path for steady requests gains nothing


class Scheduler:
    """Plan steps and keep account of all live requests."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        block_size: int,
        pacing: StepBudget,
        tier: BlockTier | None = None,
    ) -> None:
        """`pacing` limits the prefill in steps that also decode. By its step costs, requests that cannot meet their
        deadline are ended."""
        self.config = config
        self.pacing = pacing
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            facts=config.facts,
            max_step_tokens=config.max_num_batched_tokens * min(config.pipeline_depth, 2),
            enable_prefix_caching=config.enable_prefix_caching,
            checkpoint_interval=config.state_checkpoint_interval,
            key=None if tier is None else tier.key,
        )
        if tier is not None:
            self.kv.tiers = Tiers(self.kv, tier, pacing, only_prompts=config.facts.prompt_form_differs)
        if self.kv.most_blocks(config.max_model_len) > num_blocks:
            raise ValueError(
                f"one request of max_model_len {config.max_model_len} tokens does not fit into "
                f"{num_blocks} KV blocks of {block_size} tokens"
            )
        self._table = table = RequestTable(self.kv)
        # Aliases of the table's parts, which are never replaced.
        self.requests, self.running, self.waiting = table.requests, table.running, table.waiting
        self.shares, self._in_flight = table.shares, table.in_flight
        self._admission = Admission(table, pacing, config.max_num_seqs)
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._step = 0
        self._ended: list[EngineCoreOutput] = []  # requests that ended between two updates
        self._prompt_tokens = self._computed_tokens = 0

    @property
    def has_work(self) -> bool:
        """Return True if a step has work, even if only to report an ended request or to free a runner's row."""
        return bool(self.running or self.waiting or self._table.removed or self._ended)

    def reconfigure(self, **limits: Any) -> None:
        """Change `max_num_seqs`, `max_num_batched_tokens` or `max_sampled_tokens`. Running requests go on."""
        self.config = replace(self.config, **limits)
        self._admission.max_num_seqs = self.config.max_num_seqs

    # --- arrivals and departures

    def add(self, message: EngineCoreRequest, grammar: TokenMatcher | None = None) -> None:
        """Queue a request. A request with a grammar starts when the grammar is compiled.

        Raises KeyError if the id is in use: the front end guarantees that it is not.
        """
        if message.request_id in self.requests:
            raise KeyError(f"request id {message.request_id!r} is in use")
        request = Request(
            message,
            sequence_number=self._arrivals,
            eos_token_ids=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
            grammar=grammar,
        )
        self._arrivals += 1
        self._table.add(request)
        self._deadlines.watch(request)
        longest = self.config.max_model_len - request.generates
        if not 0 < request.num_prompt_tokens <= longest:
            # The front end refuses such prompts; here one would block the queue for ever.
            self.fail(request.request_id, f"prompt of {request.num_prompt_tokens} tokens: 1 to {longest} are allowed")

    def finish_request(self, request_id: str, status: RequestStatus) -> Request | None:
        """End a request for a reason from outside. Unknown ids (finished, never arrived) are a no-op: returns None."""
        request = self.requests.get(request_id)
        if request is not None:
            request.status = status
            self._table.remove(request)
        return request

    def fail(self, request_id: str, error: str) -> None:
        """End a request that cannot be computed, and remove its blocks from the prefix cache."""
        request = self.requests.get(request_id)
        if request is not None:
            self.kv.withdraw(request)
            self._end(request, RequestStatus.FINISHED_ERROR, error)

    def _end(
        self, request: Request, status: RequestStatus, error: str | None = None, refusal: Refusal | None = None
    ) -> None:
        """End a request, and report it to the front end with the next outputs."""
        self.finish_request(request.request_id, status)
        self._ended.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FINISH_REASONS[status],
                num_cached_tokens=request.num_cached_tokens,
                error=error,
                events=request.events or None,
                refusal=refusal,
            )
        )

    # --- plan

    def schedule(self, now: float = 0.0, only: Collection[str] | None = None) -> SchedulerOutput:
        """Plan the next step. Each plan is followed by `update`, `give_up`, `put_back` or `retract`, in order.

        The plan may be made while the step before it is in flight (`engine/scheduler/steps.py`), or one step in each
        pipeline stage. It then skips requests with a latest token that must be known first, and may be empty although
        there is work. `only` restricts the step to these requests.
        """
        for request in self._deadlines.passed(now, self.requests):
            self._end(request, RequestStatus.FINISHED_EXPIRED)
        plan = PlanDraft(self.config.max_num_batched_tokens, now, only, whole_prompts=self.config.facts.is_encoder)
        self._table.release_row(now)
        behind = self._plan_decodes(plan)
        if not (behind and only is None and self._share_prefill(plan, behind)):
            self._plan_prefills(plan, behind)
            self._admit(plan)
        self.pacing.count(sum(plan.num_tokens[request_id] for request_id in plan.prefills))
        self._step += 1
        self._in_flight.begin(plan)
        removed, self._table.removed = self._table.removed, []
        return plan.as_plan(self._step, removed)

    def _plan_decodes(self, plan: PlanDraft) -> list[tuple[Request, int]]:
        """Plan the running requests that are one token behind. Returns those that are further behind, and by how many
        tokens."""
        budget, num_stages, steady = plan.budget, self.config.num_stages, self._table.steady
        running = list(self.running.values())
        is_plain = len(running) >= MANY and num_stages == self.config.max_sampled_tokens == 1
        is_plain = is_plain and plan.only is None and not self._table.holds_batches
        if steady.requests and is_plain:
            awake, others = steady.begin(plan), len(running) > len(steady.requests)
            running = [*awake, *(each for each in running if not each.wakes_at)] if others else awake
        elif steady.requests:
            steady.clear()
        if self._table.holds_batches and plan.only is None:
            running = [request for request in running if not request.is_batch]
        in_flight = self._in_flight.latest.num_tokens
        # Drafts must leave one token of the budget for every other request.
        most_sampled = min(self.config.max_sampled_tokens, budget // max(len(running), 1))
        most_decodes = -(-len(running) // num_stages)
        if plan.only is not None:
            running = [request for request in running if request.request_id in plan.only]
        if num_stages > 1:
            busy = self._in_flight.blocking()
            running = [request for request in running if request.request_id not in busy]
        behind: list[tuple[Request, int]] = []
        is_running = RequestStatus.RUNNING  # looking up an enum's member takes as long as the rest of one iteration
        for request in running:
            start = request.num_computed_tokens
            if in_flight:
                start += in_flight.get(request.request_id, 0)
            num_behind = len(request.token_ids) - start
            if num_behind > 1:
                behind.append((request, num_behind))
            elif num_stages > 1 and len(plan.num_tokens) == most_decodes:
                continue  # the plans of the other stages have room for it
            elif (num_behind == 1 or request.may_decode_ahead(start)) and request.status is is_running:
                num_tokens = 1 if most_sampled == 1 else request.num_to_sample(start, most_sampled)
                end = start + num_tokens
                if end <= request.room or self._extend(plan, request, end):
                    plan.num_tokens[request.request_id] = num_tokens
                    if is_plain and (request.wakes_at or request.is_steady):
                        steady.keep(plan, request, end)
                    continue
            if request.wakes_at:
                steady.postpone(plan, request)
        plan.budget = budget - sum(plan.num_tokens.values())
        if plan.num_tokens and (behind or self.waiting):
            plan.pace = partial(self._pace, plan)
            if plan.only is None and self.pacing.leaves_out_prefill:
                plan.budget = 0
        return behind

    def _plan_prefills(self, plan: PlanDraft, behind: list[tuple[Request, int]]) -> None:
        """Give running requests chunks of their prompts from the budget. `behind` says how many tokens each lacks."""
        for request, num_behind in behind:
            if plan.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING or request.request_id in plan.prefills:
                continue  # it was preempted just now for an earlier request, or it has its chunk
            start = len(request.token_ids) - num_behind
            num_tokens = plan.chunk(start, num_behind)
            if num_tokens and self._extend(plan, request, start + num_tokens):
                plan.add_prefill(request, num_tokens, num_behind)

    def _share_prefill(self, plan: PlanDraft, behind: list[tuple[Request, int]]) -> bool:
        """Share the budget if the first prompt would take all of it; return False if it would not.

        Half of the budget goes to prompts that lack at most half as many tokens as the first prompt. Among running
        prompts, the tenant that was served least goes first, with its prompt that lacks the fewest tokens; half of this
        share is left to waiting requests. The first prompt gets the other half and the remainder, and stays the first
        until it is done, so that no prompt waits for ever. Running prompts are planned before waiting ones, because no
        request may be preempted for a running prompt once a waiting one has started.
        """
        first, most = behind[0]
        if first.status is not RequestStatus.RUNNING:
            return False  # it was preempted just now for a decode
        start = len(first.token_ids) - most
        if plan.budget:
            plan.set_pace(start)
        budget = plan.budget
        if most <= budget or budget < 2 or plan.whole_prompts or not self._extend(plan, first, start + budget):
            return False
        plan.add_prefill(first, budget - budget // 2, most)
        shorter = [each for each in behind if 2 * each[1] <= most]
        if shorter:
            shorter.sort(key=lambda each: (each[0].message.precedence, self.shares.served(each[0].tenant), each[1]))
            for_waiting = plan.budget // 2 if self.waiting else 0
            plan.budget -= for_waiting
            self._plan_prefills(plan, shorter)
            plan.budget += for_waiting
        self._admit(plan, most // 2)
        if first.request_id in plan.prefills:  # and it was not preempted for a shorter one
            # A preemption may have returned tokens to the budget, but this request got no blocks for them.
            more = min(plan.budget, budget // 2)
            plan.num_tokens[first.request_id] += more
            plan.budget -= more
        return True

    def _admit(self, plan: PlanDraft, most_missing: int | None = None) -> None:
        """Start waiting requests. End requests with a failed grammar or a deadline that cannot be kept."""
        if plan.ran_out_of_blocks or plan.budget == 0 or not self.waiting:
            return
        for request in self._admission.admit(plan, most_missing):
            if request.grammar is not None and request.grammar.error is not None:
                self._end(request, RequestStatus.FINISHED_ERROR, request.grammar.error, request.grammar.refusal)
            else:
                self._end(request, RequestStatus.FINISHED_EXPIRED)

    def _pace(self, plan: PlanDraft, start: int) -> int:
        """Return how many prefill tokens fit into a plan that has none yet."""
        num_tokens = sum(plan.num_tokens.values())
        keys = sum(self.requests[request_id].num_computed_tokens for request_id in plan.num_tokens)
        return self.pacing.prefill_tokens(StepLoad(num_tokens, keys + num_tokens), start)

    def retract(self, plan: SchedulerOutput) -> None:
        """Drop the latest plan, which has no requests and was not submitted."""
        self._step -= 1
        self._in_flight.retract()
        self._table.removed = plan.removed_request_ids + self._table.removed

    def _extend(self, plan: PlanDraft, request: Request, end: int) -> bool:
        """Give a running request the blocks of its first `end` tokens. Returns False if it has to wait for them."""
        while (block_ids := self.kv.extend(request, end)) is None:
            plan.ran_out_of_blocks = True
            victim = bystander(self._table, plan.only) or worst_ranked(self._table, self.running.values())
            if victim is None or victim is request:
                return False
            plan.drop(victim)
            self._table.put_back(victim, plan.now)
        if block_ids:
            plan.new_block_ids[request.request_id] = block_ids
        return True

    def put_back(self, plans: Sequence[SchedulerOutput], now: float) -> dict[str, int]:
        """Preempt the requests of a failed step and of the steps planned on top of it, which are all steps in flight.

        Returns the number of tokens that each live request of the failed step (`plans[0]`) would have computed. It is
        unknown how much of the plans' diffs the runner applied. Removing a row twice is harmless, so all removals are
        sent again.
        """
        steps = [self._in_flight.fail().num_tokens for _ in plans]
        reach = {}
        for request_id, num_tokens in zip(plans[0].request_ids, plans[0].num_scheduled_tokens, strict=True):
            request = self.requests.get(request_id)
            if request is not None:
                # Drafts do not count. A request that was preempted since is as suspect as the others: it is cleared
                # once it has computed all its known tokens.
                end = request.num_computed_tokens + num_tokens if request_id in steps[0] else request.num_tokens
                reach[request_id] = min(end, request.num_tokens)
        for request_id in dict.fromkeys(chain.from_iterable(steps)):
            self._table.put_back(self.running[request_id], now)
        removed = chain.from_iterable(plan.removed_request_ids for plan in plans)
        self._table.removed = list(dict.fromkeys([*removed, *self._table.removed]))
        return reach

    def give_up(self, now: float) -> None:
        """Drop the oldest step in flight, which was aborted because all its requests are about to end.

        None of its requests has advanced, so later plans for them are void: if the requests went on after all, they
        would have to be preempted. All requests of a model with states are preempted, since their states are undefined.
        """
        for request_id in self._in_flight.fail().num_tokens:
            if request_id in self._in_flight or self.kv.facts.state_bytes:
                self._table.put_back(self.running[request_id], now)

    def matchers_of(self, plan: SchedulerOutput) -> list[tuple[int, TokenMatcher]]:
        """Return the grammars of a plan's requests by their places in the plan."""
        if not self._table.num_grammars:
            return []
        grammars = ((index, self.requests[request_id].grammar) for index, request_id in enumerate(plan.request_ids))
        return [(index, grammar) for index, grammar in grammars if grammar is not None]

    # --- accounting

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float = 0.0) -> list[EngineCoreOutput]:
        """Account for the oldest step in flight. Returns what each request gained; finished requests have been
        removed.
        """
        draft = self._in_flight.end()
        valid = draft.num_tokens
        self._count_computed(plan, output)
        all_valid = len(valid) == len(plan.request_ids)
        for index in output.not_finite:
            if plan.request_ids[index] in valid:
                self.fail(plan.request_ids[index], "the model computed NaN or infinite logits for this request")
        gained = self.take_ended()
        num_sampled_of: defaultdict[str, int] = defaultdict(int)  # by tenant
        ended: list[Request] = []
        block_size = self.kv.block_size
        logprobs = output.logprobs
        prompt_logprobs, embeddings = output.prompt_logprobs, output.embeddings
        rows = (plan.request_ids, plan.num_scheduled_tokens, plan.num_sampled_tokens, output.sampled_token_ids)
        scheduled: Iterable[tuple[int, tuple[str, int, int, list[int]]]] = enumerate(zip(*rows, strict=True))
        if draft.steady:
            left = self._update_steady(draft, output, gained, num_sampled_of)
            left += range(len(draft.steady), len(plan.request_ids))
            scheduled = [(index, (rows[0][index], rows[1][index], rows[2][index], rows[3][index])) for index in left]
        for index, (request_id, num_scheduled, num_sampled, token_ids) in scheduled:
            request = self.requests.get(request_id)
            if request is None or not (all_valid or request_id in valid):
                # The request failed just now, or ended or was preempted since it was planned. Its tenant is charged all
                # the same: otherwise two tenants could take a running slot from each other for ever, each before the
                # other's step is accounted for.
                if num_scheduled > num_sampled:
                    self._prompt_tokens += num_scheduled
                if request is not None:
                    self.shares.charge(request.tenant, max(num_scheduled, OUTPUT_TOKEN_COST))
                continue
            try:
                has_ended = bool(token_ids) and request.append_output_tokens(token_ids)
                computed_before = request.num_computed_tokens
                request.num_computed_tokens += num_scheduled - num_sampled + len(token_ids)
                if num_scheduled > num_sampled or computed_before < request.num_prompt_tokens:
                    self._account_prefill(request, num_scheduled, now)
                if request.num_computed_tokens // block_size > request.num_committed_blocks:
                    self.kv.commit(request)
                if token_ids:
                    num_sampled_of[request.tenant] += len(token_ids)
                elif not request.events:
                    continue
                gain = EngineCoreOutput(
                    request_id=request_id, new_token_ids=token_ids, num_cached_tokens=request.num_cached_tokens
                )
                if has_ended:
                    self._describe_end(request, gain)
                if logprobs and index in logprobs:
                    gain.logprobs = logprobs[index][: len(token_ids)]
                if request.events:
                    gain.events = request.take_events()
                # Most steps have no log-probabilities or embeddings. After a prefill there is always an output.
                if prompt_logprobs and index in prompt_logprobs:
                    gain.prompt_logprobs = request.take_prompt_logprobs(computed_before, prompt_logprobs[index])
                if embeddings and index in embeddings:
                    gain.embedding = embeddings[index]
            except Exception as error:  # its state may be inconsistent; other requests are not affected
                logger.exception("the result of a step could not be applied to request %s", request_id)
                self.fail(request_id, f"the engine could not apply the result of a step ({type(error).__name__})")
                continue
            gained.append(gain)
            if has_ended:
                ended.append(request)
        for tenant, num_tokens in num_sampled_of.items():
            self.shares.charge(tenant, num_tokens * OUTPUT_TOKEN_COST)
        for request in ended:
            self._table.remove(request)
        return gained + self.take_ended() if self._ended else gained

    def _update_steady(
        self,
        draft: PlanDraft,
        output: ModelRunnerOutput,
        gained: list[EngineCoreOutput],
        num_sampled_of: defaultdict[str, int],
    ) -> list[int]:
        """Account for the steady requests of a step, which come first in its plan. Returns the indices of those that
        `update` has to handle, because they may end or have more to send than one token."""
        left: list[int] = []
        steady = list(draft.steady.values())
        for index in chain(output.logprobs, output.not_finite):
            if index < len(steady):
                steady[index] = None
        for index, (request, token_ids) in enumerate(zip(steady, output.sampled_token_ids, strict=False)):
            if request is None or len(token_ids) != 1 or token_ids[0] in request.ends:
                left.append(index)
                continue
            request.token_ids.append(token_ids[0])
            request.num_computed_tokens += 1
            num_sampled_of[request.tenant] += 1
            gained.append(
                EngineCoreOutput(
                    request_id=request.request_id, new_token_ids=token_ids, num_cached_tokens=request.num_cached_tokens
                )
            )
        return left

    def _count_computed(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Count all tokens that a step computed, also of requests that ended or were preempted before its end. Of
        draft tokens, only accepted ones count.
        """
        self._computed_tokens += plan.total_num_scheduled_tokens
        if self.config.max_sampled_tokens > 1:
            self._computed_tokens += sum(map(len, output.sampled_token_ids)) - sum(plan.num_sampled_tokens)

    def _account_prefill(self, request: Request, num_tokens: int, now: float) -> None:
        request.note(EventKind.PREFILL, now, num_tokens)
        self.shares.charge(request.tenant, num_tokens)
        self._prompt_tokens += num_tokens

    @staticmethod
    def _describe_end(request: Request, gain: EngineCoreOutput) -> None:
        """Add to a request's last output how the request ended."""
        if not request.generates:
            gain.new_token_ids = []
        gain.finish_reason = FINISH_REASONS[request.status]
        gain.stop_reason = request.stop_reason
        gain.is_complete = request.is_complete
        if request.grammar is not None:
            gain.error, gain.refusal = request.grammar.error, request.grammar.refusal

    def take_ended(self) -> list[EngineCoreOutput]:
        """Return the requests that ended without a sampled token, by a deadline or a failure, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_left(self) -> tuple[tuple[str, str], ...]:
        """Return the requests that lost their running slot or ended since the last call, and why."""
        if not self._table.left:  # as after most steps
            return ()
        left, self._table.left = self._table.left, []
        return tuple(left)

    def waiting_for(self, most: int | None) -> Iterator[tuple[Request, WaitsFor]]:
        """Return the first of the waiting requests, and why each waits."""
        return self._admission.waiting_for(most)

    def take_stats(self) -> SchedulerStats:
        """Return the stats of a step, and start its counters from zero."""
        stats = SchedulerStats(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.usage,
            num_preemptions=self._table.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            prefix_cache_queries=self._table.prefix_cache_queries,
            prefix_cache_hits=self._table.prefix_cache_hits,
            num_deferred=self.waiting.num_deferred if self._table.num_grammars or self.kv.tiers is not None else 0,
            tier_misses=self._table.tier_misses,
        )
        self._prompt_tokens = self._computed_tokens = self._table.num_preemptions = 0
        self._table.prefix_cache_queries = self._table.prefix_cache_hits = self._table.tier_misses = 0
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables agree with each other. For tests and idle moments; it visits
        everything.
        """
        self._table.check_integrity()
