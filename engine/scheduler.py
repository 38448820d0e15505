"""Who runs in the next step, and for how many tokens.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens`, which catches up with its
`num_tokens`; a step gives every running request some of the distance, under one token budget. A request that has
caught up samples a token, which puts it one token behind again: that is decoding. Chunked prefill, prefix caching,
resuming after a preemption and mixed batches are all the same rule.

The order within a step: running requests that are one token behind, then running requests that are further behind
(so that no prefill delays a stream), then waiting requests.

When blocks run out, the running request of the worst rank is preempted: its blocks are given back and it is computed
again later, mostly from the prefix cache. The one of the worst rank is never preempted for its own sake; it waits
with its blocks while those before it go on. The best-ranked running request can always be scheduled, since one
request of `max_model_len` fits into the whole pool, so somebody always advances.

Owned by the EngineCore, on the engine's thread. Deterministic: no clock, no randomness, no device.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from engine.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.request import FINISH_REASONS, Request, RequestStatus
from engine.waiting_queue import WaitingQueue


class Scheduler:
    """Plans steps and keeps the books of all living requests."""

    def __init__(self, config: EngineConfig, num_blocks: int, block_size: int) -> None:
        if num_blocks * block_size < config.max_model_len:
            raise ValueError(
                f"one request of max_model_len {config.max_model_len} tokens does not fit into "
                f"{num_blocks} KV blocks of {block_size} tokens"
            )
        self.config = config
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self._arrivals = 0
        self._step = 0
        self._removed: list[str] = []  # rows that the runner still holds for requests that no longer run
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, if only tell the runner to let go of a row."""
        return bool(self.running or self.waiting or self._removed)

    # --- arrivals and departures

    def add(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises KeyError if the id is in use: the front end guarantees that it is not."""
        if message.request_id in self.requests:
            raise KeyError(f"request id {message.request_id!r} is in use")
        request = Request(
            message,
            sequence_number=self._arrivals,
            eos_token_ids=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
        )
        self._arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def finish(self, request_id: str, status: RequestStatus) -> Request | None:
        """End a request for a reason from outside. Unknown ids (finished, never arrived) are a no-op: returns None."""
        request = self.requests.get(request_id)
        if request is not None:
            self._release(request)
            request.status = status
        return request

    def _release(self, request: Request) -> None:
        """Take a living request out of all tables."""
        del self.requests[request.request_id]
        if request.request_id in self.running:
            del self.running[request.request_id]
            self._removed.append(request.request_id)
        else:
            self.waiting.remove(request)
        self.kv.free(request)

    # --- plan

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """The plan of the next step. `now` only stamps the requests that start."""
        plan = _PlanDraft(self.config.max_num_batched_tokens)
        behind: list[Request] = []
        for request in self.running.values():
            if len(request.token_ids) - request.num_computed_tokens == 1:
                plan.candidates.append(request)
            else:
                behind.append(request)
        plan.candidates += behind
        undisturbed = self._schedule_running(plan)
        if undisturbed and plan.budget > 0 and self.waiting:
            self._admit_waiting(plan, now)

        self._step += 1
        removed, self._removed = self._removed, []
        return SchedulerOutput(
            step=self._step,
            removed_request_ids=removed,
            new_requests=plan.new_requests,
            new_block_ids=plan.new_block_ids,
            request_ids=list(plan.num_tokens),
            num_scheduled_tokens=list(plan.num_tokens.values()),
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - plan.budget,
        )

    def _schedule_running(self, plan: _PlanDraft) -> bool:
        """Give the running requests their tokens. Returns False if blocks ran out, so that nobody new should start."""
        undisturbed = True
        for request in plan.candidates:
            if plan.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago for one before it
            num_tokens = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            while (block_ids := self.kv.extend(request, num_tokens)) is None:
                undisturbed = False
                victim = max(self.running.values(), key=_rank)
                if victim is request:
                    break
                plan.drop(victim)
                self._preempt(victim)
            if block_ids is not None:
                plan.add(request, num_tokens)
                if block_ids:
                    plan.new_block_ids[request.request_id] = block_ids
        return undisturbed

    def _admit_waiting(self, plan: _PlanDraft, now: float) -> None:
        """Start waiting requests while budget, seats and blocks last.

        A request whose next block is being computed for somebody else in this very step waits for it: one step later
        it finds the block in the prefix cache. So the children of an n > 1 request, or a crowd with one system
        prompt, prefill it once.
        """
        being_computed = {
            self.kv.block_hash(request, index)
            for request_id, num_tokens in plan.num_tokens.items()
            if num_tokens > 1
            for request in (self.requests[request_id],)
            for index in self._blocks_completed(request, num_tokens)
        }
        admitted: list[Request] = []
        deferred = 0
        for request in self.waiting:
            if plan.budget == 0 or len(self.running) + len(admitted) >= self.config.max_num_seqs:
                break
            prefix = self.kv.find_prefix(request)
            if self._is_being_computed(request, len(prefix), being_computed):
                deferred += 1
                if deferred == self.config.max_num_seqs:
                    break
                continue
            if not self.kv.can_admit(request, prefix):
                break
            self.kv.adopt_prefix(request, prefix)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            self.kv.extend(request, num_tokens)
            being_computed.update(
                self.kv.block_hash(request, index) for index in self._blocks_completed(request, num_tokens)
            )
            plan.add(request, num_tokens)
            plan.new_requests.append(self._introduce(request))
            self._count_admission(request, now)
            admitted.append(request)
        for request in admitted:
            self.waiting.remove(request)
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING

    def _blocks_completed(self, request: Request, num_tokens: int) -> range:
        """Indices of the blocks that become full and computed when the request advances by `num_tokens`."""
        if not self.kv.enable_prefix_caching:
            return range(0)
        start = request.num_computed_tokens
        return range(start // self.kv.block_size, (start + num_tokens) // self.kv.block_size)

    def _is_being_computed(self, request: Request, index: int, being_computed: set[bytes]) -> bool:
        if not being_computed or index >= (request.num_tokens - 1) // self.kv.block_size:
            return False
        return self.kv.block_hash(request, index) in being_computed

    def _introduce(self, request: Request) -> NewRequestData:
        return NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=list(request.block_ids),
            sampling=request.sampling,
            stop_token_ids=sorted(request.eos_token_ids.union(request.sampling.stop_token_ids)),
        )

    def _count_admission(self, request: Request, now: float) -> None:
        if request.num_preemptions == 0:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
            self._prefix_cache_queries += request.num_prompt_tokens
            self._prefix_cache_hits += request.num_cached_tokens

    def _preempt(self, request: Request) -> None:
        del self.running[request.request_id]
        self._removed.append(request.request_id)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push_front(request)

    # --- books

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Book what a step computed and sampled. Returns what each request gained; finished ones are gone from here."""
        gained: list[EngineCoreOutput] = []
        block_size = self.kv.block_size
        for index, request_id in enumerate(plan.request_ids):
            request = self.requests[request_id]
            computed_before = request.num_computed_tokens
            request.num_computed_tokens += plan.num_scheduled_tokens[index]
            if computed_before < request.num_prompt_tokens:
                self._prompt_tokens += min(request.num_computed_tokens, request.num_prompt_tokens) - computed_before
            if request.num_computed_tokens // block_size > request.num_committed_blocks:
                self.kv.publish_computed(request)
            token_id = output.sampled_token_ids[index]
            if token_id < 0:
                continue
            finished = request.append_output_token(token_id)
            logprobs = output.logprobs.get(index)
            gained.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[token_id],
                    finish_reason=FINISH_REASONS[request.status] if finished else None,
                    stop_reason=request.stop_reason,
                    logprobs=None if logprobs is None else [logprobs],
                    num_cached_tokens=request.num_cached_tokens,
                    first_scheduled_time=request.first_scheduled_time,
                )
            )
            if finished:
                self._release(request)
        return gained

    def take_stats(self) -> SchedulerStats:
        """The books after a step; the counters start again from zero."""
        stats = SchedulerStats(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.usage,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
        )
        self._num_preemptions = self._prompt_tokens = self._prefix_cache_queries = self._prefix_cache_hits = 0
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables agree with each other. For tests and idle moments; O(everything)."""
        self.kv.pool.check_integrity(request.block_ids for request in self.requests.values())
        if set(self.running) & {request.request_id for request in self.waiting}:
            raise AssertionError("a request is both running and waiting")
        if len(self.running) + len(self.waiting) != len(self.requests):
            raise AssertionError("a living request is neither running nor waiting")


class _PlanDraft:
    """A plan in the making: the budget left and what has been given away."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.candidates: list[Request] = []
        self.num_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.new_requests: list[NewRequestData] = []

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Take back what a request was given, because it is preempted after all."""
        self.budget += self.num_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
