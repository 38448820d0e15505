"""Requests that wait for a running slot, and fair shares of tenants.

The order is by precedence first, which a client cannot choose. Within a precedence, the tenant that was served least
goes first (`TenantShares`). Within a tenant the order is by its own priorities, then preempted requests before all
others, then by arrival.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

from engine.scheduler.request import Request
from engine.snapshot import TenantSnapshot


class WaitingQueue:
    """One sorted list per precedence and tenant: adding and removing a request takes a binary search. Owned by the
    Scheduler."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._lines: dict[int, dict[str, list[Request]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in order, counting each as served. The queue must not change during iteration."""
        return self._in_order(lambda tenant: False)

    @property
    def oldest_arrival(self) -> float | None:
        """The earliest arrival of a request that has never run; None if there is none."""
        return min((each.message.arrival_time for each in self._unsorted() if not each.num_preemptions), default=None)

    @property
    def num_deferred(self) -> int:
        """The number of requests that would wait for a grammar or a load from a tier even if all slots were free."""
        return sum(
            each.load is not None or (each.grammar is not None and not each.grammar.is_ready)
            for each in self._unsorted()
        )

    def _unsorted(self) -> Iterator[Request]:
        return (each for tenants in self._lines.values() for line in tenants.values() for each in line)

    def below_limits(self) -> Iterator[Request]:
        """Yield, in order, the requests of tenants below their limit of running slots. The limit is checked for each
        request, so a tenant at its limit does not block those behind it. The queue must not change during iteration."""
        return self._in_order(self._shares.is_at_its_limit)

    def _in_order(self, is_out: Callable[[str], bool]) -> Iterator[Request]:
        for precedence in sorted(self._lines):
            yield from self._take_turns(self._lines[precedence], is_out)

    def _take_turns(self, tenants: dict[str, list[Request]], is_out: Callable[[str], bool]) -> Iterator[Request]:
        turns: list[tuple[float, int, str, Iterator[Request]]] = [
            (self._shares.served(tenant), number, tenant, iter(line))
            for number, (tenant, line) in enumerate(tenants.items())
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
        """Add a request. A preempted request goes before all requests of the same tenant and priority that never
        ran."""
        tenants = self._lines.setdefault(request.message.precedence, {})
        insort(tenants.setdefault(request.tenant, []), request, key=_place)
        self._size += 1

    def remove(self, request: Request) -> None:
        tenants = self._lines[request.message.precedence]
        line = tenants[request.tenant]
        del line[bisect_left(line, _place(request), key=_place)]
        if not line:
            del tenants[request.tenant]
            if not tenants:
                del self._lines[request.message.precedence]
        self._size -= 1


def _place(request: Request) -> tuple[int, bool, int]:
    """Return the sort key among one tenant's requests, which does not change while a request waits."""
    return request.message.priority, not request.num_preemptions, request.sequence_number


# ------------------------------------------------------------------------------------------------------------- fairness
# Fair sharing between tenants: the tenant that was served least goes next.
#
# The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
# counter of what it was served, prompt tokens plus twice the output tokens, divided by its weight; among tenants that
# compete for a running slot the smallest counter goes first. When a tenant begins to compete, its counter is lifted to
# the smallest one of those that compete, so that no tenant saves up credit: neither while idle, nor by asking for less
# than its share, nor while held at its limit. Owned by the Scheduler.


OUTPUT_TOKEN_COST = 2.0  # the paper's choice: an output token costs about as much as two prompt tokens
_MAX_REMEMBERED = 4096  # counters of idle tenants that are kept


class TenantShares:
    """The counter of each tenant, and the numbers of its live and running requests."""

    def __init__(self) -> None:
        self.num_living: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._weights: dict[str, float] = {}  # of the tenants that have requests
        self._total_weight = 0.0
        self._limits: dict[str, int] = {}  # running slots at once; 0 is no limit
        # By tenant; idle tenants in order, the longest idle first.
        self._served: OrderedDict[str, float] = OrderedDict()
        self._latest = ""  # the tenant that got a running slot last

    def arrive(self, tenant: str, weight: float, max_running: int) -> None:
        """Count a request of this tenant that is queued. The weight and the limit of the latest request apply."""
        competed = self._competes(tenant)
        self._weights[tenant] = weight
        self._total_weight = sum(self._weights.values())
        self._limits[tenant] = max_running
        self.num_living[tenant] += 1
        self._served.setdefault(tenant, 0.0)
        if not competed:
            self._lift(tenant)

    def leave(self, tenant: str) -> None:
        """Count a request of this tenant that ended in any way. If it was running, `stop` must follow."""
        self.num_living[tenant] -= 1
        if not self.num_living[tenant]:
            del self.num_living[tenant], self._weights[tenant], self._limits[tenant]
            self._total_weight = sum(self._weights.values())
            self._served.move_to_end(tenant)
            self._forget_idle_tenants()

    def start(self, tenant: str) -> None:
        """Count a request of this tenant that got a running slot."""
        self.num_running[tenant] += 1
        self._latest = tenant

    def stop(self, tenant: str) -> None:
        """Count a request of this tenant that gave its running slot back: it waits again, or has ended."""
        competed = self._competes(tenant)
        self.num_running[tenant] -= 1
        if not self.num_running[tenant]:
            del self.num_running[tenant]
        if not competed and self._competes(tenant):
            self._lift(tenant)

    def charge(self, tenant: str, cost: float) -> None:
        """Add the service of one step to the tenant's counter. `cost` is in prompt tokens."""
        self._served[tenant] += cost / self._weights[tenant]

    def charge_elsewhere(self, served: Mapping[str, float]) -> None:
        """Add the service of other engines, already divided by weight. Tenants without a counter here are skipped."""
        for tenant, amount in served.items():
            if tenant in self._served:
                self._served[tenant] += amount

    def served(self, tenant: str) -> float:
        """Return the tenant's counter: its service so far, divided by its weight."""
        return self._served[tenant]

    def cost(self, tenant: str, num_tokens: int) -> float:
        """Return by how much `num_tokens` prompt tokens would raise the tenant's counter."""
        return num_tokens / self._weights[tenant]

    def is_at_its_limit(self, tenant: str) -> bool:
        """Return True if the tenant holds as many running slots as its limit allows."""
        return 0 < self._limits.get(tenant, 0) <= self.num_running[tenant]

    def is_below_its_share(self, tenant: str, num_slots: int) -> bool:
        """Return True if the tenant would not exceed its share of the running slots with one more."""
        return self.num_running[tenant] + 1 <= self._share(tenant, num_slots)

    def above_their_share(self, num_slots: int) -> set[str]:
        """Return the tenants that hold more than their share of the running slots."""
        return {tenant for tenant, held in self.num_running.items() if held > self._share(tenant, num_slots)}

    def snapshot(self, most: int) -> tuple[TenantSnapshot, ...]:
        """Return snapshots of the `most` tenants with the most requests."""
        return tuple(
            TenantSnapshot(
                tenant=tenant,
                num_running=self.num_running[tenant],
                num_waiting=num_living - self.num_running[tenant],
                max_running=self._limits[tenant],
                served=self._served[tenant],
            )
            for tenant, num_living in self.num_living.most_common(most)
        )

    def _share(self, tenant: str, num_slots: int) -> float:
        # The share is at least one running slot, for any number of tenants and any weight.
        return max(1.0, num_slots * self._weights[tenant] / self._total_weight)

    def _competes(self, tenant: str) -> bool:
        return self.num_living[tenant] > self.num_running[tenant] and not self.is_at_its_limit(tenant)

    def _lift(self, tenant: str) -> None:
        """Raise the counter of a tenant that begins to compete to the smallest counter of its competitors, or without
        competitors to that of the latest tenant that got a running slot. A higher counter stays."""
        floor = min(
            (self._served[other] for other in self.num_living if other != tenant and self._competes(other)),
            default=self._served.get(self._latest, 0.0),
        )
        self._served[tenant] = max(self._served[tenant], floor)

    def _forget_idle_tenants(self) -> None:
        while len(self._served) - len(self.num_living) > _MAX_REMEMBERED:
            oldest_idle = next(tenant for tenant in self._served if tenant not in self.num_living)
            del self._served[oldest_idle]
