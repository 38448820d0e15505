"""All live requests, their transitions and their deadlines.

When a request arrives, starts, is preempted or leaves, then its place in the queue, its tenant's share, its blocks, the
steps in flight and the runner's rows change together. Only this module changes them. Owned by the Scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import chain

from engine.messages import EventKind
from engine.plan import owned
from engine.scheduler.checkpoints import StepsWithCopies
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import FINISH_REASONS, Request, RequestStatus
from engine.scheduler.steps import SteadyRequests, StepsInFlight
from engine.scheduler.waiting_queue import TenantShares, WaitingQueue

LONGEST_HOLD = 60.0  # seconds for which rows of batches get nothing before one of them is released


class RequestTable:
    """All live requests by id, the queue, and the running requests.

    `removed` are requests that no longer run but still have a row in the runner. The counters grow until
    `Scheduler.take_stats` reads them.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.shares = TenantShares()
        self.waiting = WaitingQueue(self.shares)
        self.in_flight = StepsInFlight() if kv.checkpoints is None else StepsWithCopies(kv.checkpoints, self.requests)
        self.steady = SteadyRequests()
        self.removed: list[str] = []
        # Requests that lost their running slot or ended, and why, until `take_left`.
        self.left: list[tuple[str, str]] = []
        self.num_grammars = 0  # live requests that have, or had, a grammar
        self.num_batch = 0  # live rows of batches, without the one that was released
        self._held_since = math.inf  # the time since which they get nothing
        self._released = ""  # the id of the row that runs like other requests
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # in tokens
        self.prefix_cache_hits = self.tier_misses = 0

    @property
    def holds_batches(self) -> bool:
        """True if rows of batches get nothing of a step, because another request lives. They keep their blocks."""
        return 0 < self.num_batch < len(self.requests) - (self._released in self.requests)

    def release_row(self, now: float) -> None:
        """Let one row of a batch at a time run like any other request, but last, after `LONGEST_HOLD`: a server that is
        never idle must run some."""
        self._held_since = min(now, self._held_since) if self.holds_batches else math.inf
        if self._released not in self.requests and now - self._held_since >= LONGEST_HOLD:
            row = next(each for each in chain(self.running.values(), self.waiting) if each.is_batch)
            row.is_batch, self._released = False, row.request_id
            self.num_batch -= 1

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.num_batch += request.is_batch
        self.num_grammars += request.sampling.restricts_tokens
        self.shares.arrive(request.tenant, request.message.tenant_weight, request.message.tenant_max_running)
        self.waiting.push(request)

    def start(self, request: Request, now: float) -> None:
        """Give a request a running slot. The caller, which walks the queue, removes it from there afterwards."""
        self.running[request.request_id] = request
        self.shares.start(request.tenant)
        request.status = RequestStatus.RUNNING
        request.note(EventKind.SCHEDULED, now, request.num_computed_tokens)
        self.prefix_cache_queries += request.num_tokens * request.reads_prefix_cache
        self.prefix_cache_hits += request.num_computed_tokens
        if self.kv.tiers is not None and request.reads_prefix_cache:
            self.tier_misses += request.num_tokens - request.num_computed_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens

    def preempt(self, request: Request, now: float) -> None:
        """Take a request's running slot and its blocks. The caller, which walks the queue, puts it back there
        afterwards.
        """
        self.in_flight.void(request.request_id)
        self.steady.leave(request)
        request.note(EventKind.PREEMPTED, now, request.num_computed_tokens)
        del self.running[request.request_id]
        self.shares.stop(request.tenant)
        self.removed.append(request.request_id)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.left.append((request.request_id, "preempted"))

    def put_back(self, request: Request, now: float) -> None:
        """Preempt a request, and put it back into the queue."""
        self.preempt(request, now)
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Remove an ended request, and release everything it owned. Its status has the reason."""
        self.left.append((request.request_id, FINISH_REASONS[request.status]))
        self.in_flight.void(request.request_id)
        self.steady.leave(request)
        del self.requests[request.request_id]
        self.num_batch -= request.is_batch
        self.num_grammars -= request.sampling.restricts_tokens
        if request.grammar is not None:  # None after its last restricted token
            request.grammar.close()
        self.shares.leave(request.tenant)
        if request.request_id in self.running:
            del self.running[request.request_id]
            self.shares.stop(request.tenant)
            self.removed.append(request.request_id)
        else:
            self.waiting.remove(request)
        self.kv.free(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables agree with each other. For tests and idle moments; it visits
        everything.
        """
        loading = [] if self.kv.tiers is None else self.kv.tiers.tables()
        tables = [owned(request.block_ids) for request in self.requests.values()]
        self.kv.pool.check_integrity([*loading, *tables])
        if self.kv.checkpoints is not None:
            self.kv.checkpoints.check_integrity()
        if set(self.running) & {request.request_id for request in self.waiting}:
            raise AssertionError("a request is both running and waiting")
        if len(self.running) + len(self.waiting) != len(self.requests):
            raise AssertionError("a live request is neither running nor waiting")
        if self.shares.num_living.total() != len(self.requests) or self.shares.num_running.total() != len(self.running):
            raise AssertionError("the tenants' counts differ from the live requests")
        if not set(self.in_flight.latest.num_tokens) <= set(self.running):
            raise AssertionError("a step in flight counts for a request that does not run")


# ------------------------------------------------------------------------------------------------------------ deadlines
# Which requests have run out of time. Owned by the Scheduler; times are seconds of `time.monotonic()`.


class Deadlines:
    """A heap of deadlines, so that a step looks only at those that have passed.

    A request may have two: for its first token and for its end. Most requests end in time and leave their entries
    behind; when these outnumber the entries of live requests, the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def watch(self, request: Request) -> None:
        for deadline in (request.message.first_token_deadline, request.message.deadline):
            if deadline is not None:
                heapq.heappush(self._heap, (deadline, request.request_id))

    def passed(self, now: float, living: Mapping[str, Request]) -> list[Request]:
        """Return the live requests that are out of time, each once."""
        if len(self._heap) > 4 * len(living) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in living]
            heapq.heapify(self._heap)
        late: dict[str, Request] = {}
        while self._heap and self._heap[0][0] <= now:
            request = living.get(heapq.heappop(self._heap)[1])
            if request is not None and request.is_late(now):
                late[request.request_id] = request
        return list(late.values())
