"""The simulation of clients, requests and engines, event by event on a virtual clock. Deterministic."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.messages import EngineCoreOutput, EngineCoreRequest, EventKind, FinishReason
from engine.simulation.engines import Engines

WORK_PER_STEP = 512
WORK_PER_ROW = 32  # for each output of a step
WORK_PER_REQUEST = 512  # in addition to 1 for each prompt token


class SimulatedRequest(msgspec.Struct, kw_only=True):
    """A request as its client sees it. Times are virtual seconds."""

    request_id: str
    number: int
    start_time: float  # when it was sent
    num_prompt_tokens: int
    arrival_time: float = 0.0  # at the engine
    scheduled_time: float | None = None  # when it got a running slot first
    num_open: int = 1  # choices that have not ended
    token_times: list[float] = []  # as the client sees them
    token_choices: list[int] = []  # the number of each token's choice; empty: one choice
    begun: int = 0  # choices with a token, as bits
    num_cached_tokens: int = 0  # the least of its choices
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None  # of the choice that ended last
    end_time: float | None = None
    error: str | None = None
    is_refused: bool = False  # by the admission


class Outage(msgspec.Struct, frozen=True):
    """The loss of some of several engines from `start` to `end`. Requests that have not begun there go to the other
    engines; the others fail."""

    start: float
    end: float
    engines: range


class Workload(Protocol):
    """The requests of all clients."""

    @property
    def due(self) -> float:
        """The time of the next request that is known now; infinity if there is none."""
        ...

    def take(self) -> EngineCoreRequest:
        """Return the next request. The simulation sets its `arrival_time`."""
        ...

    def ended(self, request: SimulatedRequest) -> None:
        """Take note that a client's request has ended, after which further requests may become due."""
        ...


class Place(Protocol):
    """A request's slot in the admission queue."""

    def begin(self) -> None: ...

    def leave(self, num_tokens: int) -> None: ...


class Door:
    """The admission of requests, on the simulation's clock."""

    @property
    def due(self) -> float:
        """The time at which it must `look` without a cause; infinity if there is none."""
        return math.inf

    def enter(self, request: EngineCoreRequest) -> Place | str | None:
        """Return a queue slot for the request, or the reason why it is refused; None if `look` returns it later."""
        raise NotImplementedError

    def look(self, now: float) -> Iterable[tuple[EngineCoreRequest, Place | str]]:
        """Return the requests that have waited until now. Called after the events of each moment."""
        return ()


class Simulation:
    """A simulation that advances in bounded parts. Between two calls of `advance`, everything may be read and changed.

    `inbound` returns the seconds that a prompt of that many tokens takes from client to engine; `outbound` is the
    seconds that outputs take from engine to client. Neither delays the engine.
    """

    def __init__(
        self,
        engines: Engines,
        load: Workload,
        door: Callable[[Callable[[], float]], Door] | None = None,
        *,
        inbound: Callable[[int], float] = lambda num_tokens: 0.0,
        outbound: float = 0.0,
        keep: int | None = None,
        keep_tokens: float = math.inf,
        outages: Sequence[Outage] = (),
    ) -> None:
        """Make a simulation. `door` makes the admission, given a clock. `keep` is the number of ended requests to
        remember (None: all), and `keep_tokens` limits the sum of their output tokens."""
        self.engines = engines
        self.load = load
        self.num_sent = self.num_ended = self.num_refused = self.num_placed_again = 0
        self.num_preemptions = self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.work = 0  # work units done so far; a unit takes about 0.2 microseconds
        self.kept_tokens = 0  # output tokens of remembered requests
        self.request_seconds = 0.0  # the integral of the number of requests in the engines
        self.open: dict[str, SimulatedRequest] = {}
        self.ended: deque[SimulatedRequest] = deque()
        self._keep = math.inf if keep is None else keep
        self._keep_tokens = keep_tokens
        self._door = None if door is None else door(lambda: engines.now)
        self._places: dict[str, Place] = {}
        self._inbound = inbound
        self._outbound = outbound
        self._under_way: list[tuple[float, int, EngineCoreRequest]] = []
        self._news: list[tuple[float, int, SimulatedRequest]] = []  # ended requests that clients do not know of yet
        changes = [(outage.start, True, outage.engines) for outage in outages]
        changes += [(outage.end, False, outage.engines) for outage in outages]
        self._changes = deque(sorted(changes, key=lambda change: change[:2]))  # at equal times, restarts come first

    @property
    def now(self) -> float:
        return self.engines.now

    @property
    def num_steps(self) -> int:
        return self.engines.num_steps

    @property
    def due(self) -> float:
        """The time of the next event; infinity if there is none."""
        due = min(self._next_request, self.engines.due)
        if due == math.inf and not self.open:
            return due
        due = min(due, self._changes[0][0]) if self._changes else due
        return due if self._door is None else min(due, self._door.due)

    @property
    def _next_request(self) -> float:
        """The time of the next known action of a client."""
        due = self.load.due
        for heap in (self._under_way, self._news):
            if heap and heap[0][0] < due:
                due = heap[0][0]
        return due

    def advance(self, until: float = math.inf, max_steps: int | None = None, max_work: float = math.inf) -> bool:
        """Advance to `until`, by at most `max_steps` steps and `max_work` units: any number of requests may arrive
        during a long step. Returns True if there are further events."""
        last_step = math.inf if max_steps is None else self.num_steps + max_steps
        most_work = self.work + max_work
        while self.num_steps < last_step and self.work < most_work:
            due = self.due
            if due > until:
                if until < math.inf:
                    self._pass(until)
                return due < math.inf
            if due == math.inf:
                return False
            self._happen(due)
        return self.due < math.inf

    def _pass(self, now: float) -> None:
        self.request_seconds += self.engines.num_living * (now - self.now)
        self.engines.now = now

    def _happen(self, now: float) -> None:
        """Process all events of this moment: steps end, then clients receive and send, then steps begin."""
        self._pass(now)
        while self._changes and self._changes[0][0] <= now:
            _, goes, engines = self._changes.popleft()
            if goes:
                self._lose(engines)
            else:
                self.engines.restore(engines)
        for outputs, ends in self.engines.advance(now):
            stats = outputs.stats
            self.work += len(ends) * WORK_PER_STEP + len(outputs.outputs) * WORK_PER_ROW
            self.num_preemptions += stats.num_preemptions
            self.prefix_cache_queries += stats.prefix_cache_queries
            self.prefix_cache_hits += stats.prefix_cache_hits
            for output in outputs.outputs:
                self._receive(output, now, ends)
        while self._news and self._news[0][0] <= now:
            self.load.ended(heapq.heappop(self._news)[2])
        while self.load.due <= now:
            self._send(self.load.take())
        while self._under_way and self._under_way[0][0] <= now:
            self._arrive(heapq.heappop(self._under_way)[2])
        if self._door is not None:
            for request, place in self._door.look(now):
                self._place(request, place)
        self.engines.begin(self._next_request)

    def _lose(self, engines: range) -> None:
        lost = self.engines.lose(engines)
        begun = {_of_choice(request.request_id)[0] for request, has_begun in lost if has_begun}
        for request, _ in lost:
            record = self.open.get(_of_choice(request.request_id)[0])
            if record is None:
                continue  # it has failed with another choice
            if record.request_id in begun or record.token_times:
                record.error = "its engine was lost"
                self._end(record, self.now + self._outbound)
            else:
                self.num_placed_again += 1
                self.engines.add(request)

    def _send(self, request: EngineCoreRequest) -> None:
        record = SimulatedRequest(
            request_id=request.request_id,
            number=self.num_sent,
            start_time=self.now,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_open=request.sampling.n,
        )
        self.num_sent += 1
        self.work += WORK_PER_REQUEST + record.num_prompt_tokens
        self.open[request.request_id] = record
        request.arrival_time = record.arrival_time = self.now + self._inbound(record.num_prompt_tokens)
        heapq.heappush(self._under_way, (record.arrival_time, record.number, request))

    def _arrive(self, request: EngineCoreRequest) -> None:
        if self._door is None:
            self.engines.add(request)
        elif (place := self._door.enter(request)) is not None:
            self._place(request, place)

    def _place(self, request: EngineCoreRequest, place: Place | str) -> None:
        if isinstance(place, str):
            record = self.open[request.request_id]
            self.num_refused += 1
            record.error, record.is_refused = place, True
            self._end(record, self.now + self._outbound)
            return
        self._places[request.request_id] = place
        self.engines.add(request)

    def _receive(self, output: EngineCoreOutput, now: float, ends: list[float]) -> None:
        request_id, choice = _of_choice(output.request_id)
        record = self.open.get(request_id)
        if record is None:
            return  # it has failed with another choice
        time = now + self._outbound
        self.kept_tokens += len(output.new_token_ids)
        if not record.begun >> choice & 1 and output.new_token_ids:
            record.begun |= 1 << choice
            if request_id in self._places:
                self._places[request_id].begin()
        if request_id != output.request_id:
            record.token_choices += [choice] * len(output.new_token_ids)
        if len(output.new_token_ids) == 1:
            record.token_times.append(time)
        else:
            record.token_times += [end + self._outbound for end in ends[: len(output.new_token_ids)]]
        if output.events:
            for event in output.events:
                if event.kind is EventKind.SCHEDULED and record.scheduled_time is None:
                    record.scheduled_time = event.time
                record.num_preemptions += event.kind is EventKind.PREEMPTED
        if output.finish_reason is not None:
            record.num_open -= 1
            if record.finish_reason is None or output.num_cached_tokens < record.num_cached_tokens:
                record.num_cached_tokens = output.num_cached_tokens
            record.finish_reason = output.finish_reason
            if output.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
                record.error = output.error or str(output.finish_reason)
            if not record.num_open:
                self._end(record, time)

    def _end(self, record: SimulatedRequest, time: float) -> None:
        place = self._places.pop(record.request_id, None)
        if place is not None:
            place.leave(len(record.token_times))
        del self.open[record.request_id]
        record.end_time = time
        self.num_ended += 1
        self.ended.append(record)
        while len(self.ended) > self._keep or (self.kept_tokens > self._keep_tokens and self.ended):
            self.kept_tokens -= len(self.ended.popleft().token_times)
        heapq.heappush(self._news, (time, record.number, record))


def _of_choice(choice_id: str) -> tuple[str, int]:
    """Return the id of the request and the number of its choice."""
    request_id, _, number = choice_id.partition("/")
    return request_id, int(number or 0)
