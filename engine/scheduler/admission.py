"""The start of waiting requests, and preemption."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from engine.costs.table import StepBudget
from engine.messages import EventKind
from engine.scheduler.request import Request
from engine.scheduler.request_table import RequestTable
from engine.scheduler.steps import PlanDraft
from engine.snapshot import WaitsFor

MAX_OVERTAKEN = 16  # how often shorter requests of its tenant may take the running slot that a request would have got
_MAX_SKIPPED = 32  # longer requests skipped in one search for shorter ones


class Admission:
    """Gives waiting requests running slots, blocks and the rest of a step's token budget."""

    def __init__(self, table: RequestTable, pacing: StepBudget, max_num_seqs: int) -> None:
        self._table = table
        self._kv = table.kv
        self._pacing = pacing
        self.max_num_seqs = max_num_seqs

    def admit(self, plan: PlanDraft, most_missing: int | None = None) -> list[Request]:
        """Start waiting requests while budget, running slots and blocks last.

        If another request computes a request's next block, in this step or in the one in flight, the request waits: a
        step later it finds the block in the prefix cache. So the choices of an n > 1 request, or many requests with the
        same system prompt, prefill it once. The lookup takes time: after `max_num_seqs` such requests, others with the
        same first block wait without a lookup, and the requests behind them are tried.

        A request with a prefix in a tier starts when the prefix is loaded; requests behind it do not wait for that.

        With `most_missing`, only requests that lack at most that many tokens start. They overtake a longer request only
        if enough running slots remain for all longer ones, or if it belongs to the same tenant and was overtaken fewer
        than `MAX_OVERTAKEN` times. They never overtake a request of their tenant that has another priority.

        Returns requests that cannot succeed: their deadline cannot be met by the measured cost of a prefill token, or
        their grammar has an error.
        """
        table, kv, now, only = self._table, self._kv, plan.now, plan.only
        being_computed = self._being_computed(plan)
        admitted: list[Request] = []
        dismissed: list[Request] = []
        in_vain: list[Request] = []
        passed_over = 0
        skipped: list[Request] = []  # requests that lack more than `most_missing`
        crowd: set[bytes] = set()  # first blocks of the requests that were passed over
        candidates: Iterable[Request] = table.waiting.below_limits()
        if only is not None:  # they all had running slots when the step failed, so limits do not apply
            candidates = [request for request in table.waiting if request.request_id in only]
        for request in candidates:
            if plan.budget == 0:
                break
            if request.is_batch and table.holds_batches and only is None:
                continue
            if passed_over >= self.max_num_seqs:
                if len(table.running) >= self.max_num_seqs:
                    break
                if self._first_block(request) in crowd:
                    continue
            if request.grammar is not None and not request.grammar.is_ready:
                if request.grammar.error is not None:
                    in_vain.append(request)
                elif not request.events:
                    request.note(EventKind.WAITS_FOR_GRAMMAR, now, 0)
                continue
            if request.events and request.events[-1].kind is EventKind.WAITS_FOR_GRAMMAR:
                request.note(EventKind.GRAMMAR_READY, now, 0)
            if request.load is not None:
                continue
            prefix = kv.find_prefix(request)
            num_found = len(prefix) // kv.num_groups
            if self._is_being_computed(request, num_found, being_computed):
                passed_over += 1
                crowd.add(kv.block_hash(request, 0))
                continue
            if kv.tiers is not None and only is None and kv.tiers.begin(request, prefix):
                continue
            if kv.checkpoints is not None:
                prefix = kv.up_to_checkpoint(request, prefix)
                num_found = len(prefix) // kv.num_groups
            num_missing = request.num_tokens - num_found * kv.block_size
            if most_missing is not None and num_missing > most_missing:
                skipped.append(request)
                if len(skipped) == _MAX_SKIPPED:
                    break
                continue
            if plan.whole_prompts and num_missing > plan.budget:
                break
            is_scarce = bool(skipped) and len(table.running) + len(skipped) >= self.max_num_seqs
            if not all(self._may_overtake(request, each, is_scarce) for each in skipped):
                break
            # An engine without other work tries anyway: otherwise a cost measured too high would never be corrected.
            if plan.num_tokens and request.is_late(now + num_missing * self._pacing.table.seconds_per_prefill_token):
                in_vain.append(request)
                continue
            while not (fits := self._fits(request, prefix)):
                victim = who_makes_room(table, request, self.max_num_seqs, admitted, only)
                if victim is None:
                    break
                plan.drop(victim)
                table.preempt(victim, now)
                dismissed.append(victim)
            if not fits:
                break
            kv.adopt_prefix(request, prefix)
            num_tokens = plan.chunk(request.num_computed_tokens, num_missing)
            kv.extend(request, request.num_computed_tokens + num_tokens)
            being_computed.update(
                kv.block_hash(request, index) for index in self._blocks_completed(request, num_tokens)
            )
            plan.add_prefill(request, num_tokens, num_missing)
            plan.new_requests.append(request.to_new_request())
            table.start(request, now)
            admitted.append(request)
            if is_scarce:
                for each in skipped:
                    each.num_overtaken += 1
        for request in admitted:
            table.waiting.remove(request)
        for request in dismissed:
            table.waiting.push(request)
        return in_vain

    @staticmethod
    def _may_overtake(request: Request, longer: Request, is_scarce: bool) -> bool:
        """Return True if a request may start before a longer one that precedes it in the queue. `is_scarce` means that
        it may take the running slot that the longer one would have got."""
        if request.tenant != longer.tenant:
            return not is_scarce
        is_equal = request.message.priority == longer.message.priority
        return is_equal and not (is_scarce and longer.num_overtaken == MAX_OVERTAKEN)

    def waiting_for(self, most: int | None) -> Iterator[tuple[Request, WaitsFor]]:
        """Yield the first `most` waiting requests in order, each with the reason why it waits. Called between steps."""
        table, kv = self._table, self._kv
        being_computed: set[bytes] | None = None
        is_full, lacks_blocks = len(table.running) >= self.max_num_seqs, False
        for request in islice(table.waiting, most):
            if table.shares.is_at_its_limit(request.tenant):
                yield request, WaitsFor.LIMIT
            elif request.grammar is not None and not request.grammar.is_ready:
                yield request, WaitsFor.GRAMMAR
            elif request.load is not None:
                yield request, WaitsFor.LOADED
            elif is_full:
                is_below = table.shares.is_below_its_share(request.tenant, self.max_num_seqs)
                yield request, WaitsFor.SLOT if is_below or len(table.shares.num_living) == 1 else WaitsFor.SHARE
            elif lacks_blocks:
                yield request, WaitsFor.BLOCKS
            else:
                if being_computed is None:
                    being_computed = self._to_be_computed()
                prefix = kv.find_prefix(request)
                if self._is_being_computed(request, len(prefix) // kv.num_groups, being_computed):
                    yield request, WaitsFor.COMPUTED
                else:
                    lacks_blocks = not kv.can_admit(request, prefix)
                    yield request, WaitsFor.BLOCKS if lacks_blocks else WaitsFor.STEP

    def _to_be_computed(self) -> set[bytes]:
        """Return the hashes of the blocks that running prefills may complete in the next step."""
        return {
            self._kv.block_hash(request, index)
            for request in self._table.running.values()
            if request.num_tokens > request.num_computed_tokens + 1
            for index in self._blocks_completed(request, self._kv.max_step_tokens)
        }

    def _fits(self, request: Request, prefix: list[int]) -> bool:
        return len(self._table.running) < self.max_num_seqs and self._kv.can_admit(request, prefix)

    def _being_computed(self, plan: PlanDraft) -> set[bytes]:
        """Return the hashes of the blocks that prefills in this step and in the one in flight will complete."""
        in_flight = self._table.in_flight.latest
        return {
            self._kv.block_hash(request, index)
            for request_id in in_flight.prefills | plan.prefills
            for request in (self._table.requests[request_id],)
            for index in self._blocks_completed(
                request, in_flight.num_tokens.get(request_id, 0) + plan.num_tokens.get(request_id, 0)
            )
        }

    def _blocks_completed(self, request: Request, num_tokens: int) -> range:
        """Return the indices of the blocks that become full and computed when the request advances by `num_tokens`,
        except blocks with tokens that are not sampled yet."""
        if not self._kv.enable_prefix_caching:
            return range(0)
        start = request.num_computed_tokens
        end = min(start + num_tokens, len(request.token_ids))
        return range(start // self._kv.block_size, end // self._kv.block_size)

    def _first_block(self, request: Request) -> bytes | None:
        """Return the hash of a request's first block; None if it is not full or the request does not read the cache."""
        if not request.reads_prefix_cache or request.num_tokens <= self._kv.block_size:
            return None
        return self._kv.block_hash(request, 0)

    def _is_being_computed(self, request: Request, index: int, being_computed: set[bytes]) -> bool:
        if not (being_computed and request.reads_prefix_cache):
            return False
        if index >= (request.num_tokens - 1) // self._kv.block_size:
            return False
        return self._kv.block_hash(request, index) in being_computed


# ----------------------------------------------------------------------------------------------------------- preemption
# The choice of the running request that is preempted.
#
# A tenant's priorities decide which of its own requests is preempted, and never which tenant loses one. Otherwise a
# tenant that calls everything urgent would keep its blocks and take those of all others. Used by the Scheduler.


def worst_ranked(table: RequestTable, candidates: Iterable[Request]) -> Request | None:
    """Return the running request to preempt first; None if there are no candidates.

    The candidates are narrowed down in this order: the worst precedence; tenants above their share of the running slots
    in use, if any; the tenant of the latest arrival; its request of the worst priority and latest arrival.

    Arrival decides between tenants, not the service they received: that changes with every step, and two tenants would
    preempt each other in turns and compute everything twice. The tenant that arrived first runs to its end.
    """
    left = list(candidates)
    if len(left) > 1:
        worst = max(request.message.precedence for request in left)
        left = [request for request in left if request.message.precedence == worst]
        above = table.shares.above_their_share(len(table.running))
        left = [request for request in left if request.tenant in above] or left
        tenant = max(left, key=lambda request: request.sequence_number).tenant
        left = [request for request in left if request.tenant == tenant]
    return max(left, key=lambda request: (request.message.priority, request.sequence_number), default=None)


def bystander(table: RequestTable, only: Collection[str] | None) -> Request | None:
    """Return the worst-ranked running request that a restricted step leaves out; None if there is none."""
    if only is None:
        return None
    return worst_ranked(table, (request for request in table.running.values() if request.request_id not in only))


def who_makes_room(
    table: RequestTable, newcomer: Request, slots: int, admitted: Collection[Request], only: Collection[str] | None
) -> Request | None:
    """Return the running request to preempt for the waiting `newcomer`; None if there is none.

    In a restricted step it is a request that may not run. Otherwise it is a row of a batch, if one runs and the
    newcomer is none. Otherwise it is the worst-ranked request of a tenant above its share, if the newcomer's tenant is
    below its own share and was served no more. Without this rule, a tenant that fills all running slots with long
    generations would shut out all other tenants until they end.
    """
    shares = table.shares
    if only is not None:
        return bystander(table, only)
    if table.holds_batches and not newcomer.is_batch:
        row = worst_ranked(table, (each for each in table.running.values() if each.is_batch and each not in admitted))
        if row is not None:
            return row
    if not shares.is_below_its_share(newcomer.tenant, slots):
        return None
    served = shares.served(newcomer.tenant)
    above = shares.above_their_share(slots)
    candidates = (
        request
        for request in table.running.values()
        if request.tenant in above
        and (newcomer.message.precedence, served) <= (request.message.precedence, shares.served(request.tenant))
        and request not in admitted
    )
    return worst_ranked(table, candidates)
