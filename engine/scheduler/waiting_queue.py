"""Requests that wait for a running slot, in the order in which they will get one.

First by precedence, which a client cannot choose; within a precedence the tenants take turns by what they have been
served (`engine.scheduler.fairness`); within a tenant by its own priorities, and then by arrival, those that were
preempted before all others.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile

from engine.scheduler.fairness import TenantShares
from engine.scheduler.request import Request, RequestStatus

Line = OrderedDict[str, Request]


class WaitingQueue:
    """One line per precedence, tenant and priority. Every operation is O(1), except iteration and those that step over
    preempted requests. Owned by the Scheduler."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._lines: dict[int, dict[str, dict[int, Line]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All, in order, counting each request that was passed as served. The queue must not change meanwhile."""
        return self._in_order(lambda tenant: False)

    def below_limits(self) -> Iterator[Request]:
        """Those whose tenant may hold another running slot, as things stand when it is their turn: a tenant at its
        limit blocks nobody behind it. In order; the queue must not change meanwhile."""
        return self._in_order(self._shares.is_at_its_limit)

    def _in_order(self, is_out: Callable[[str], bool]) -> Iterator[Request]:
        for precedence in sorted(self._lines):
            yield from self._take_turns(self._lines[precedence], is_out)

    def _take_turns(self, tenants: dict[str, dict[int, Line]], is_out: Callable[[str], bool]) -> Iterator[Request]:
        turns: list[tuple[float, int, str, Iterator[Request]]] = [
            (self._shares.served(tenant), number, tenant, _by_priority(lines))
            for number, (tenant, lines) in enumerate(tenants.items())
        ]
        heapq.heapify(turns)
        while turns:
            served, number, tenant, requests = turns[0]
            request = None if is_out(tenant) else next(requests, None)
            if request is None:
                heapq.heappop(turns)
                continue
            yield request
            served += self._shares.cost(tenant, request.num_tokens)
            heapq.heapreplace(turns, (served, number, tenant, requests))

    def push(self, request: Request) -> None:
        """Behind everybody of the same tenant and priority."""
        tenants = self._lines.setdefault(request.precedence, {})
        lines = tenants.setdefault(request.tenant, {})
        lines.setdefault(request.priority, OrderedDict())[request.request_id] = request
        self._size += 1

    def push_front(self, request: Request) -> None:
        """Before everybody of the same tenant and priority who has not run, because a preempted request has waited its
        turn already; among those preempted by arrival."""
        self.push(request)
        line = self._lines[request.precedence][request.tenant][request.priority]
        line.move_to_end(request.request_id, last=False)
        earlier = [
            other
            for other in takewhile(lambda other: other.status is RequestStatus.PREEMPTED, line.values())
            if other.rank < request.rank
        ]
        for other in reversed(earlier):
            line.move_to_end(other.request_id, last=False)

    def remove(self, request: Request) -> None:
        tenants = self._lines[request.precedence]
        lines = tenants[request.tenant]
        line = lines[request.priority]
        del line[request.request_id]
        if not line:
            del lines[request.priority]
            if not lines:
                del tenants[request.tenant]
                if not tenants:
                    del self._lines[request.precedence]
        self._size -= 1


def _by_priority(lines: dict[int, Line]) -> Iterator[Request]:
    for priority in sorted(lines):
        yield from lines[priority].values()
