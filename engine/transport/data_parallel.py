"""`EngineClient` for several engines (replicas), each with all the weights, its own KV cache and its own requests.

1. A replica that dies is started again; the others go on. Its waiting requests are given to another replica, once. Its
   running requests end with an error: one of them may have caused the death, and would kill the next replica.
2. If all replicas die repeatedly without a token in between, or one dies before all are loaded, the whole client counts
   as dead.
3. The number of replicas follows the length of the queues. A surplus replica gets no new requests, and ends after its
   last request.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import msgspec

from engine import commands, messages
from engine.costs.table import StepCostTable
from engine.errors import EngineDead, EngineLost, RequestFailed
from engine.routing.router import WHOLE, FleetSize, Router, wanted_engines
from engine.routing.tenants import FleetShares, TenantLimits
from engine.scheduler.waiting_queue import OUTPUT_TOKEN_COST
from engine.transport.channel import Deliver

if TYPE_CHECKING:  # importing it loads ZMQ
    from engine.transport.process_client import ProcessClient

logger = logging.getLogger(__name__)

MAX_DEATHS = 5  # per replica, in a row without a token; when all replicas exceed it, the client is dead
RESTART_SECONDS, MAX_DOUBLINGS = 0.5, 6  # between a death and the next start; doubled with each death in a row
SHARING_SECONDS = 0.1  # between two `ChargeTenants`
SIZING_SECONDS = 1.0  # between two decisions on the number of engines
LOOKING_SECONDS = 0.2  # between two checks for lost KV events
ASKING_SECONDS = 0.5  # between two requests to an engine for its whole prefix cache
NOTHING_DONE = messages.SchedulerStats(
    step=0,
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_preemptions=0,
    prompt_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)


class DataParallelClient:
    """An `EngineClient` over `size` to `max_size` replicas with `max_num_seqs` running slots each. `make_replica` makes
    the client of a replica by its index, also for a restart."""

    def __init__(
        self,
        make_replica: Callable[[int], ProcessClient],
        size: int,
        max_num_seqs: int,
        max_size: int | None = None,
        *,
        stall_limit: float = math.inf,
    ) -> None:
        """Set up all replicas. One that has work and makes no step for `stall_limit` seconds counts as dead."""
        most = max_size or size
        self.replicas = [Replica(index, make_replica, is_wanted=index < size) for index in range(most)]
        self._fleet = FleetSize(size, most)
        self._resized = anyio.Event()
        self._router = Router(most, max_num_seqs)
        self._placed: dict[str, Placed] = {}  # requests that have not ended
        self.num_placed_again = self._num_deaths = 0
        self._limits = TenantLimits()
        self._shares = FleetShares(most)
        self._shared = 0.0  # the time of the latest `ChargeTenants`
        self._step = 0
        self._announced = False
        self._over = False
        self._stall_limit = stall_limit
        self._deliver: Deliver = lambda message: None

    @property
    def is_available(self) -> bool:
        return self._announced and not self._over and bool(self._alive())

    @property
    def last_progress(self) -> float:
        """The heartbeat of the replica that is busy without progress for longest; if none is busy, the latest."""
        busy = [since for replica in self.replicas if (since := replica.busy_since) is not None]
        return min(busy) if busy else max(replica.client.last_progress for replica in self.replicas)

    @property
    def is_asleep(self) -> bool:
        return all(replica.busy_since is None for replica in self.replicas)

    @property
    def num_engines(self) -> int:
        """The number of engines that take requests; at least 1."""
        return len(self._open()) or 1

    @property
    def num_blocks(self) -> int:
        """The KV blocks of all engines that run."""
        return sum(each.engine_info.num_blocks for each in self.replicas if each.engine_info is not None)

    @property
    def routing(self) -> messages.RoutingStats:
        return self._router.stats(self._alive(), self.num_placed_again, self._num_deaths)

    @asynccontextmanager
    async def running(self, deliver: Deliver) -> AsyncIterator[None]:
        self._deliver = deliver
        async with anyio.create_task_group() as task_group:
            for replica in self.replicas:
                task_group.start_soon(self._keep, replica)
            task_group.start_soon(self._look)
            if len(self.replicas) > self._fleet.size:
                task_group.start_soon(self._follow)
            try:
                yield
            finally:
                if not self._over:
                    self._end()
                    deliver([commands.EngineDied(EngineDead("the engine has been shut down"))])
                task_group.cancel_scope.cancel()  # on cancellation, replicas still send Close and wait

    def send(self, command: commands.Command) -> None:
        """Send a command about requests to the engines of these requests, any other command to every engine."""
        match command:
            case commands.AddRequests():
                self._limits.hold(command)  # if no engine runs, keep it until one does
                self._start(command.choices[0].tenant)
            case commands.FinishRequests(request_ids, reason):
                by_replica: dict[int, list[str]] = {}
                for request_id in request_ids:
                    placed = self._placed.get(request_id)
                    if placed is None:
                        self._limits.drop(request_id)
                    else:
                        self._forget(request_id, by_itself=reason in WHOLE)
                        by_replica.setdefault(placed.replica.index, []).append(request_id)
                for index, ids in by_replica.items():
                    self.replicas[index].client.send(commands.FinishRequests(ids, reason))
            case _:
                for index in self._alive():
                    self.replicas[index].client.send(command)

    def _start(self, tenant: str) -> None:
        """Send the tenant's held prompts that may run now to engines."""
        while (alive := self._open()) and (prompt := self._limits.next(tenant)) is not None:
            assert isinstance(prompt, commands.AddRequests)
            self._place(prompt, alive)

    def _place(self, command: commands.AddRequests, alive: Sequence[int], *, again: bool = False) -> None:
        """Send a prompt's choices to one engine. `again`: retry after an engine died, at most once."""
        first = command.choices[0]
        index = self._router.choose(
            [request.request_id for request in command.choices],
            command.prompt_token_ids,
            alive,
            tenant=first.tenant,
            salt=first.cache_salt,
            max_tokens=first.sampling.max_tokens,
        )
        replica, now, length = self.replicas[index], time.monotonic(), len(command.prompt_token_ids)
        for request in command.choices:
            replica.requests[request.request_id] = now
            self._placed[request.request_id] = Placed(replica, request, length, None if again else command)
        replica.client.send(command)

    async def query(self, question: commands.Question) -> dict[int, commands.Answer]:
        """Ask every live engine; engines that die before answering are left out."""
        answers: dict[int, commands.Answer] = {}
        errors: list[Exception] = []

        async def ask(index: int) -> None:
            try:
                answers[index] = (await self.replicas[index].client.query(question))[0]
            except (EngineDead, RequestFailed) as error:
                errors.append(error)

        async with anyio.create_task_group() as task_group:
            for index in self._alive():
                task_group.start_soon(ask, index)
        if not answers:
            raise errors[0] if errors else EngineDead("no engine is running")
        return dict(sorted(answers.items()))

    # --- replicas

    def _alive(self) -> list[int]:
        return [replica.index for replica in self.replicas if replica.engine_info is not None]

    def _open(self) -> list[int]:
        """The engines that get requests: the live ones that are wanted, or if there are none, all live ones."""
        alive = self._alive()
        return [index for index in alive if self.replicas[index].is_wanted] or alive

    async def _follow(self) -> None:
        """Adjust the number of replicas to the queues, every `SIZING_SECONDS`."""
        while True:
            await anyio.sleep(SIZING_SECONDS)
            if self._announced:
                self._resize(wanted_engines(*self._router.queued_and_running()))

    def _resize(self, wanted: int) -> None:
        before = self._fleet.size
        size = self._fleet.update(wanted, time.monotonic())
        if size != before:
            logger.info("Changing the number of engines from %d to %d", before, size)
            by_worth = sorted(self.replicas, key=self._worth, reverse=True)
            for rank, replica in enumerate(by_worth):
                replica.is_wanted = rank < size
            self._resized.set()
            self._resized = anyio.Event()
        for replica in self.replicas:
            if not replica.is_wanted and replica.num_starts and not replica.ended.is_set() and not replica.requests:
                replica.mark_dead()
                self._router.forget(replica.index)

    def _worth(self, replica: Replica) -> tuple[bool, bool, float, int]:
        """Return a sort key that is greatest for the replicas to keep: first wanted ones, then live ones, then those
        with the most open work and unique cache content."""
        is_alive, seconds = replica.engine_info is not None, self._router.seconds_lost_with(replica.index)
        return replica.is_wanted, is_alive, seconds, -replica.index

    async def _keep(self, replica: Replica) -> None:
        """Run a replica while it is wanted, and start it again when it has died."""
        while True:
            while not replica.is_wanted:
                await self._resized.wait()
            replica.start()
            async with replica.client.running(lambda events: self._receive(replica, events)):
                await replica.ended.wait()
            if self._over:
                return
            await anyio.sleep(RESTART_SECONDS * 2.0 ** min(replica.num_deaths - 1, MAX_DOUBLINGS))

    def _receive(self, replica: Replica, events: list[commands.Event]) -> None:
        for_all: list[commands.Event] = []
        for event in events:
            try:
                for_all += self._take(replica, event)
            except Exception as error:  # an engine with invalid events counts as dead
                died = EngineDead(f"an event of the engine is invalid: {error}")
                died.__cause__ = error
                for_all += self._take(replica, commands.EngineDied(died))
        if for_all:
            self._deliver(for_all)

    def _take(self, replica: Replica, event: commands.Event) -> list[commands.Event]:
        """Account for an event, and return the events to deliver for it."""
        if self._over or replica.ended.is_set():
            return []
        if isinstance(event, messages.EngineCoreOutputs):
            replica.stats = event.stats
            self._take_costs(replica, event.stats.step_costs)
            if event.kv_events is not None and not self._router.apply(replica.index, event.kv_events):
                self._ask(replica)
            for output in event.outputs:
                self._account(output)
            self._share(time.monotonic())
            return [self._merged(event.outputs, event.stats, event.timestamp)]
        if isinstance(event, messages.EngineReady):
            replica.engine_info = event
            self._router.describe(event.block_size, event.facts.kv_windows)
            self._take_costs(replica, event.step_costs)
            if len(self.replicas) > 1:
                self._ask(replica)
            for tenant in self._limits.tenants:
                self._start(tenant)
            if self._announced:
                logger.info("Engine %d runs%s", replica.index, " again" if replica.num_starts > 1 else "")
            elif len(self._alive()) == self._fleet.size:
                self._announced = True
                return [as_one_engine([each.engine_info for each in self.replicas if each.engine_info is not None])]
        elif isinstance(event, commands.RequestsBegun):
            for request_id in event.request_ids:
                if request_id in self._placed:
                    self._placed[request_id].command = None
        elif isinstance(event, commands.EngineDied):
            return [self._mark_dead(replica, event)]
        return []

    def _mark_dead(self, replica: Replica, died: commands.EngineDied) -> commands.Event:
        """End the requests of a replica that has died, or the whole client. Return the event to deliver."""
        lost, error = list(replica.requests), died.error
        replica.num_deaths += 1
        self._num_deaths += 1
        replica.mark_dead()
        in_use = [each for each in self.replicas if each.is_wanted]
        if not self._announced or not (self._alive() or any(each.num_deaths <= MAX_DEATHS for each in in_use)):
            self._end()
            return died
        logger.error("Engine %d died with %d requests: %s", replica.index, len(lost), error, exc_info=error)
        self._router.forget(replica.index)
        gone = {request_id: self._placed.pop(request_id) for request_id in lost}
        lost = self._place_again(gone)
        for request_id in lost:
            self._limits.end(gone[request_id].request.tenant)
            self._start(gone[request_id].request.tenant)
        outputs = [
            messages.EngineCoreOutput(
                request_id=each,
                new_token_ids=[],
                finish_reason=messages.FinishReason.ERROR,
                error="the engine that ran this request has died",
                rank_lost=str(error) if isinstance(error, EngineLost) else None,
            )
            for each in lost
        ]
        return self._merged(outputs, NOTHING_DONE, time.monotonic())

    def _place_again(self, lost: dict[str, Placed]) -> list[str]:
        """Give the requests that had not begun to other live engines. Return the ids of those that cannot go on."""
        alive = self._open()
        waiting = {id(placed.command): placed.command for placed in lost.values() if placed.command is not None}
        if not alive or not waiting:
            return list(lost)
        for command in waiting.values():
            choices = [each for each in command.choices if each.request_id in lost and lost[each.request_id].command]
            self._place(commands.AddRequests(command.prompt_token_ids, choices), alive, again=True)
            self.num_placed_again += len(choices)
        return [request_id for request_id, placed in lost.items() if placed.command is None]

    def _account(self, output: messages.EngineCoreOutput) -> None:
        """Account for the output of a request."""
        num_tokens = len(output.new_token_ids)
        self._router.advanced(output.request_id, num_tokens)
        placed = self._placed.get(output.request_id)
        if placed is None:
            return
        if num_tokens or output.prompt_logprobs or output.embedding:
            placed.replica.num_deaths = 0
            cost = num_tokens * OUTPUT_TOKEN_COST + max(0, placed.prompt_tokens - output.num_cached_tokens)
            placed.prompt_tokens = 0
            self._shares.charge(placed.replica.index, placed.request, cost)
        if output.finish_reason is not None:
            self._forget(output.request_id, by_itself=output.finish_reason in WHOLE)

    def _share(self, now: float) -> None:
        """Charge tenants in each engine for the service of the others, at most every `SHARING_SECONDS`."""
        if now - self._shared < SHARING_SECONDS:
            return
        self._shared = now
        for replica, served in zip(self.replicas, self._shares.take(), strict=True):
            if served and replica.engine_info is not None:
                replica.client.send(commands.ChargeTenants(served))

    def _ask(self, replica: Replica) -> None:
        """Ask an engine to publish its whole prefix cache, and changes from then on."""
        now = time.monotonic()
        if now - replica.asked >= ASKING_SECONDS:
            replica.asked = now
            replica.client.send(commands.PublishKVEvents(self._router.key))

    async def _look(self) -> None:
        """Check regularly for lost KV events and ask for the whole cache again; end held requests that are past their
        deadlines, and engines that have work but make no step."""
        while not self._over:
            await anyio.sleep(LOOKING_SECONDS)
            for index in self._alive():
                replica = self.replicas[index]
                if self._router.index.lacks(index, replica.kv_sequence):
                    self._ask(replica)
                replica.kv_sequence = replica.client.kv_sequence  # events on the way now will be here at the next look
            now = time.monotonic()
            for replica in self.replicas:
                if (since := replica.busy_since) is not None and now - since > self._stall_limit:
                    error = EngineLost(f"the engine has work but made no step for {self._stall_limit:g} s")
                    self._receive(replica, [commands.EngineDied(error)])
            late = [request_id for request_id in self._limits.late(now) if self._limits.drop(request_id)]
            if late and not self._over:
                self._deliver([self._merged([timed_out(each) for each in late], NOTHING_DONE, now)])

    def _end(self) -> None:
        self._over = True
        for replica in self.replicas:
            replica.ended.set()

    def _forget(self, request_id: str, *, by_itself: bool = False) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            del placed.replica.requests[request_id]
            self._router.ended(request_id, by_itself=by_itself)
            self._limits.end(placed.request.tenant)
            self._start(placed.request.tenant)

    def _take_costs(self, replica: Replica, costs: bytes | None) -> None:
        if costs:
            self._router.set_costs(replica.index, StepCostTable.from_json(costs))

    def _merged(
        self, outputs: list[messages.EngineCoreOutput], stats: messages.SchedulerStats, timestamp: float
    ) -> messages.EngineCoreOutputs:
        self._step += 1
        return merged(self.replicas, outputs, stats, timestamp, step=self._step, num_held=self._limits.num_held)


# ------------------------------------------------------------------------------------------------------------- replicas
# One engine of several, and the merging of several engines' events into one stream.


@dataclass(slots=True)
class Placed:
    """A request in an engine. While it waits there, `command` can be given to another engine, once."""

    replica: Replica
    request: messages.EngineCoreRequest
    prompt_tokens: int  # prompt tokens not yet charged to the tenant
    command: commands.AddRequests | None


class Replica:
    """One engine of several: its client and its requests. Owned by a DataParallelClient."""

    def __init__(self, index: int, make: Callable[[int], ProcessClient], *, is_wanted: bool) -> None:
        self.index = index
        self.is_wanted = is_wanted  # if False, it gets no new requests and ends after its last one
        self._make = make
        self.engine_info: messages.EngineReady | None = None  # while the engine lives
        self.requests: dict[str, float] = {}  # request id → time when it was sent
        self.client = make(index)
        self.num_starts = 0
        self.num_deaths = 0  # deaths since its last token
        self._begin()

    def start(self) -> None:
        """Prepare to run, with a new client if this replica has run before."""
        if self.num_starts:
            self.client = self._make(self.index)
        self._begin()
        self.num_starts += 1

    def _begin(self) -> None:
        self.stats = NOTHING_DONE
        self.asked = 0.0  # when it was last asked for its whole prefix cache
        self.kv_sequence = 0  # the sequence number of its KV events at the latest check
        self.ended = anyio.Event()

    def mark_dead(self) -> None:
        """Drop its requests and let its client end, because it has died or is not wanted any more."""
        self.engine_info = None
        self.requests.clear()
        self.ended.set()

    @property
    def busy_since(self) -> float | None:
        """The time since which it has had work but made no step; None if it has no work or is dead.

        A replica that sleeps although it has requests counts as busy: it fails to receive them.
        """
        if self.engine_info is None:
            return None
        if not self.client.is_asleep:
            return self.client.last_progress
        oldest = next(iter(self.requests.values()), None)
        return None if oldest is None else max(self.client.last_progress, oldest)


def as_one_engine(engines: Sequence[messages.EngineReady]) -> messages.EngineReady:
    """Return one description of all engines: the strictest limits, and the sum of their blocks."""
    return msgspec.structs.replace(
        engines[0],
        vocab_size=min(each.vocab_size for each in engines),
        num_blocks=sum(each.num_blocks for each in engines),
        block_size=min(each.block_size for each in engines),
        max_model_len=min(each.max_model_len for each in engines),
    )


def merged(
    replicas: Sequence[Replica],
    outputs: list[messages.EngineCoreOutput],
    stats: messages.SchedulerStats,
    timestamp: float,
    *,
    step: int,
    num_held: int,
) -> messages.EngineCoreOutputs:
    """Return one replica's step as a step of all replicas: counters of this replica, levels summed over all.
    `num_held`: requests that are in no engine yet."""
    alive = [(each.engine_info.num_blocks, each.stats) for each in replicas if each.engine_info is not None]
    num_blocks = sum(blocks for blocks, _ in alive) or 1
    levels = msgspec.structs.replace(
        stats,
        step=step,
        num_running=sum(each.num_running for _, each in alive),
        num_waiting=sum(each.num_waiting for _, each in alive) + num_held,
        num_deferred=sum(each.num_deferred for _, each in alive),
        kv_cache_usage=sum(blocks * each.kv_cache_usage for blocks, each in alive) / num_blocks,
        checkpoints=_sum_of([each.checkpoints for _, each in alive if each.checkpoints is not None]),
    )
    return messages.EngineCoreOutputs(outputs=outputs, stats=levels, timestamp=timestamp)


def _sum_of(checkpoints: Sequence[messages.CheckpointStats]) -> messages.CheckpointStats | None:
    if not checkpoints:
        return None
    return messages.CheckpointStats(
        count=sum(each.count for each in checkpoints),
        num_bytes=sum(each.num_bytes for each in checkpoints),
        hits=sum(each.hits for each in checkpoints),
    )


def timed_out(request_id: str) -> messages.EngineCoreOutput:
    """Return the final output of a request that was not given to an engine before its deadline."""
    return messages.EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=messages.FinishReason.TIMEOUT
    )
