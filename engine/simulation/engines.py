"""One engine core, or several behind their router, on virtual time, without threads and processes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.commands import AddRequests, Command, FinishRequests, PublishKVEvents, ResetPrefixCache
from engine.core.core import EngineCore
from engine.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine.routing.router import WHOLE, Route, Router
from engine.simulation.counting import CountingExecutor, VirtualClock

MakeCore = Callable[[VirtualClock], tuple[EngineCore, CountingExecutor]]

MOST_AT_ONCE = 1000  # steps


@dataclass(eq=False)
class SimulatedEngine:
    """One engine with its own clock. Making a step moves the clock to the end of the step."""

    index: int
    core: EngineCore
    executor: CountingExecutor
    clock: VirtualClock
    inbox: list[Command] = field(default_factory=list)  # carried out between two steps
    outputs: EngineCoreOutputs | None = None  # of the step in progress
    leaps: bool = False

    def begin(self, now: float, horizon: float) -> None:
        """Carry out the commands that have arrived and make a step, if there is work. Nothing arrives before the
        horizon, so several steps that begin before it are made as one where the result is the same."""
        self.clock.now = now
        for command in self.inbox:
            self.core.carry_out(command)
        self.inbox.clear()
        if self.core.has_work:
            if self.leaps:
                most, budget = self._num_steps_at_once(horizon), self.core.config.max_num_batched_tokens
                self.core.scheduler.reconfigure(
                    max_sampled_tokens=most,
                    max_num_batched_tokens=max(budget, most * len(self.core.scheduler.running)),
                )
            self.outputs = self.core.step()

    def _num_steps_at_once(self, horizon: float) -> int:
        """Return for how many steps all running requests decode while no request starts, ends before the last of these
        steps, is preempted or has a deadline."""
        scheduler = self.core.scheduler
        running, kv = scheduler.running, scheduler.kv
        if not running or len(scheduler.shares.num_living) > 1:
            return 1
        if scheduler.waiting and len(running) < scheduler.config.max_num_seqs:
            return 1
        most, num_keys = MOST_AT_ONCE, 0
        for request in running.values():
            num_tokens = len(request.token_ids)
            most = min(most, request.max_num_tokens - num_tokens)
            num_keys += num_tokens
            if num_tokens - request.num_computed_tokens != 1 or request.message.deadline is not None:
                return 1
        most = min(most, (kv.pool.num_free // (len(running) * kv.num_groups) - 1) * kv.block_size)
        return self.executor.foresee(len(running), num_keys, most, horizon) if most > 1 else 1


class Engines:
    """The engines and the router of `engine.transport.data_parallel`. `add` acts at `now`, `advance` ends the steps
    that are due, and `begin` begins the next ones."""

    def __init__(
        self,
        make_cores: Sequence[MakeCore],
        now: float = 0.0,
        *,
        leaps: bool = False,
        route: Route = "prefix",
        owner: Callable[[EngineCoreRequest], int] | None = None,
    ) -> None:
        """Make an engine of each. With `leaps`, a single engine makes several steps at once if no event can come
        between them: same results, in a fraction of the time. Its core must not learn step costs. `owner` returns the
        index of a request's engine, where no router chooses it."""
        self.now = now
        self.num_steps = 0  # steps begun
        size, clocks = len(make_cores), [VirtualClock(now) for _ in make_cores]
        self.replicas = [
            SimulatedEngine(index, *make_core(clock), clock)
            for index, (make_core, clock) in enumerate(zip(make_cores, clocks, strict=True))
        ]
        for replica in self.replicas:
            replica.leaps = leaps and size == 1 and replica.core.config.pipeline_depth == 1
        core = self.replicas[0].core
        self._owner = owner
        has_router = size > 1 and owner is None
        self._router = Router(size, core.config.max_num_seqs, route=route, key=b"simulated") if has_router else None
        self._imbalances: list[float] = []  # the maximum of the engines' uncached tokens / their mean, at each arrival
        if self._router is not None:
            self._router.describe(core.executor.block_size, core.config.facts.kv_windows)
            for replica in self.replicas:
                self._router.set_costs(replica.index, replica.core.costs)
                replica.core.carry_out(PublishKVEvents(self._router.key))
        self._alive = list(range(size))
        self._owners: dict[str, tuple[SimulatedEngine, EngineCoreRequest]] = {}  # of requests that have not ended
        self._ends: list[tuple[float, int]] = []  # a heap: the end of each step in progress, and its replica
        self._ready: set[int] = set()  # replicas without a step in progress that may have work

    @property
    def due(self) -> float:
        """The end of the next step; infinity if there is none."""
        return self._ends[0][0] if self._ends else math.inf

    @property
    def num_busy(self) -> int:
        return sum(bool(each.inbox) or each.core.has_work for each in self.replicas)

    @property
    def num_living(self) -> int:
        """The number of requests that have not ended."""
        return len(self._owners)

    def add(self, request: EngineCoreRequest) -> None:
        """Give all choices of a request to an engine. Several have the request's id with their number after a "/"."""
        choices = _choices(request)
        index = 0 if self._owner is None else self._owner(request)
        if self._router is not None:
            index = self._router.choose(
                [choice.request_id for choice in choices],
                request.prompt_token_ids,
                self._alive,
                tenant=request.tenant,
                salt=request.cache_salt,
                max_tokens=request.sampling.max_tokens,
            )
            tokens = self._router.uncached_tokens
            self._imbalances.append(max(tokens) * len(tokens) / max(sum(tokens), 1))
        replica = self.replicas[index]
        self._owners.update((choice.request_id, (replica, choice)) for choice in choices)
        replica.inbox.append(AddRequests.of(choices))
        if replica.outputs is None:
            self._ready.add(index)

    @property
    def imbalance(self) -> float:
        """The engines' maximum of uncached tokens in flight divided by their mean, averaged over arrivals."""
        return sum(self._imbalances) / len(self._imbalances) if self._imbalances else 1.0

    def advance(self, now: float) -> list[tuple[EngineCoreOutputs, list[float]]]:
        """Move the time to `now`, at most `due`. Returns the outputs of the steps that end, and their end times."""
        self.now = now
        ended: list[tuple[EngineCoreOutputs, list[float]]] = []
        while self.due <= now:
            replica = self.replicas[heapq.heappop(self._ends)[1]]
            assert replica.outputs is not None
            if self._router is not None and replica.outputs.kv_events is not None:
                self._router.apply(replica.index, replica.outputs.kv_events)
            ended.append((replica.outputs, replica.executor.ends))
            replica.outputs = None
            self._ready.add(replica.index)
        for outputs, _ in ended:
            for output in outputs.outputs:
                if self._router is not None:
                    self._router.advanced(output.request_id, len(output.new_token_ids))
                if output.finish_reason is not None:
                    self._forget(output.request_id, by_itself=output.finish_reason in WHOLE)
        return ended

    def begin(self, horizon: float) -> None:
        """Begin a step on every idle engine that has work. No request arrives before the horizon."""
        for index in sorted(self._ready):
            replica = self.replicas[index]
            if replica.inbox or replica.core.has_work:
                replica.begin(self.now, horizon)
                if replica.outputs is not None:
                    heapq.heappush(self._ends, (replica.clock.now, index))
                    self.num_steps += len(replica.executor.ends)
        self._ready.clear()

    def reset(self, index: int) -> None:
        """Empty the cache of an engine without requests."""
        self.replicas[index].core.carry_out(ResetPrefixCache())

    def lose(self, lost: Collection[int]) -> list[tuple[EngineCoreRequest, bool]]:
        """End some of several engines with their requests and caches. Returns these requests, and which had begun."""
        requests = [request for replica, request in self._owners.values() if replica.index in lost]
        begun = {request_id for index in lost for request_id in self.replicas[index].core.scheduler.running}
        for request in requests:
            self._forget(request.request_id)
        self._alive = [index for index in self._alive if index not in lost]
        self._ready.difference_update(lost)
        self._ends = [end for end in self._ends if end[1] not in lost]
        heapq.heapify(self._ends)
        for index in lost:
            replica = self.replicas[index]
            replica.outputs = None
            replica.inbox.clear()
            replica.core.carry_out(FinishRequests([*replica.core.scheduler.requests], FinishReason.ABORT))
            replica.core.carry_out(ResetPrefixCache())
            if self._router is not None:
                self._router.forget(index)
        return [(request, request.request_id in begun) for request in requests]

    def restore(self, lost: Collection[int]) -> None:
        """Start these engines again with empty caches; running ones stay as they are."""
        lost = [index for index in lost if index not in self._alive]
        self._alive += lost
        if self._router is not None:
            for index in lost:
                self._router.set_costs(index, self.replicas[index].core.costs)
                self.replicas[index].core.carry_out(PublishKVEvents(self._router.key))

    def _forget(self, request_id: str, *, by_itself: bool = False) -> None:
        self._owners.pop(request_id, None)
        if self._router is not None:
            self._router.ended(request_id, by_itself=by_itself)


def _choices(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return a request for each choice, with answers that differ."""
    sampling = request.sampling
    if sampling.n == 1:
        return [request]
    return [
        replace(
            request,
            request_id=f"{request.request_id}/{number}",
            sampling=replace(sampling, n=1, seed=(sampling.seed or 0) + number * (sampling.max_tokens or 0)),
        )
        for number in range(sampling.n)
    ]
