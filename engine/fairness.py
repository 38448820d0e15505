"""Fair sharing between tenants: who has had the least of the engine goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of what it was served, prompt tokens plus twice the output tokens, divided by its weight; among waiting tenants
the smallest counter goes first. A tenant that comes back after an idle time is lifted to the smallest counter of those
active, so that nobody saves up credit. Owned by the Scheduler.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

OUTPUT_TOKEN_COST = 2.0  # the paper's choice: an output token costs about as much as two prompt tokens
_MAX_REMEMBERED = 4096  # idle tenants whose counters are kept


class TenantShares:
    """Counters of all tenants, and how many requests each has living and running."""

    def __init__(self) -> None:
        self.num_living: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._served: OrderedDict[str, float] = OrderedDict()

    def arrive(self, tenant: str, weight: float) -> None:
        """A request of this tenant is queued. The weight of the latest request counts."""
        if not self.num_living[tenant]:
            floor = min((self._served[other] for other in self.num_living if other != tenant), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
            self._served.move_to_end(tenant)
        self._weights[tenant] = weight
        self.num_living[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of this tenant is gone, however it ended."""
        self.num_living[tenant] -= 1
        if not self.num_living[tenant]:
            del self.num_living[tenant], self._weights[tenant]
            self._forget_idle_tenants()

    def start(self, tenant: str) -> None:
        """A request of this tenant got a seat."""
        self.num_running[tenant] += 1

    def stop(self, tenant: str) -> None:
        """A request of this tenant gave its seat back."""
        self.num_running[tenant] -= 1
        if not self.num_running[tenant]:
            del self.num_running[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Book what a step did for this tenant, in prompt tokens."""
        self._served[tenant] += cost / self._weights[tenant]

    def served(self, tenant: str) -> float:
        """What this tenant was served so far, by its weight."""
        return self._served[tenant]

    def cost(self, tenant: str, num_tokens: int) -> float:
        """By how much the counter would grow for these prompt tokens."""
        return num_tokens / self._weights[tenant]

    def seats(self, tenant: str, num_seats: int) -> float:
        """This tenant's fair part of the seats, among those who have requests."""
        return num_seats * self._weights[tenant] / sum(self._weights.values())

    def _forget_idle_tenants(self) -> None:
        while len(self._served) - len(self.num_living) > _MAX_REMEMBERED:
            oldest_idle = next(tenant for tenant in self._served if tenant not in self.num_living)
            del self._served[oldest_idle]
