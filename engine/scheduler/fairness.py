"""Fair sharing between tenants: who has had the least of the engine goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of what it was served, prompt tokens plus twice the output tokens, divided by its weight; among tenants that
compete for a running slot the smallest counter goes first. A tenant that begins to compete is lifted to the smallest
counter of those that do, so that nobody saves up credit: neither by being idle, nor by asking for less than its share,
nor by being held at its limit. Owned by the Scheduler.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from engine.snapshot import TenantSnapshot

OUTPUT_TOKEN_COST = 2.0  # the paper's choice: an output token costs about as much as two prompt tokens
_MAX_REMEMBERED = 4096  # idle tenants whose counters are kept


class TenantShares:
    """Counters of all tenants, and how many requests each has living and running."""

    def __init__(self) -> None:
        self.num_living: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._weights: dict[str, float] = {}  # of the tenants that have requests
        self._total_weight = 0.0
        self._limits: dict[str, int] = {}  # running slots at once; 0 is no limit
        self._served: OrderedDict[str, float] = (
            OrderedDict()
        )  # by every tenant known; of those idle, the longest idle first
        self._latest = ""  # the tenant that got a running slot last

    def arrive(self, tenant: str, weight: float, max_running: int) -> None:
        """A request of this tenant is queued. The weight and the limit of the latest request count."""
        competed = self._competes(tenant)
        self._weights[tenant] = weight
        self._total_weight = sum(self._weights.values())
        self._limits[tenant] = max_running
        self.num_living[tenant] += 1
        self._served.setdefault(tenant, 0.0)
        if not competed:
            self._lift(tenant)

    def leave(self, tenant: str) -> None:
        """A request of this tenant is gone, however it ended. If it was running, `stop` follows."""
        self.num_living[tenant] -= 1
        if not self.num_living[tenant]:
            del self.num_living[tenant], self._weights[tenant], self._limits[tenant]
            self._total_weight = sum(self._weights.values())
            self._served.move_to_end(tenant)
            self._forget_idle_tenants()

    def start(self, tenant: str) -> None:
        """A request of this tenant got a running slot."""
        self.num_running[tenant] += 1
        self._latest = tenant

    def stop(self, tenant: str) -> None:
        """A request of this tenant gave its running slot back: it waits again, or has left."""
        competed = self._competes(tenant)
        self.num_running[tenant] -= 1
        if not self.num_running[tenant]:
            del self.num_running[tenant]
        if not competed and self._competes(tenant):
            self._lift(tenant)

    def charge(self, tenant: str, cost: float) -> None:
        """Account for what a step did for this tenant, in prompt tokens."""
        self._served[tenant] += cost / self._weights[tenant]

    def charge_elsewhere(self, served: Mapping[str, float]) -> None:
        """Account for what other engines have done, by each tenant's weight. Who is not known here begins anew."""
        for tenant, amount in served.items():
            if tenant in self._served:
                self._served[tenant] += amount

    def served(self, tenant: str) -> float:
        """What this tenant was served so far, by its weight."""
        return self._served[tenant]

    def cost(self, tenant: str, num_tokens: int) -> float:
        """By how much the counter would grow for these prompt tokens."""
        return num_tokens / self._weights[tenant]

    def is_at_its_limit(self, tenant: str) -> bool:
        """Whether the tenant holds as many running slots as it may at all."""
        return 0 < self._limits.get(tenant, 0) <= self.num_running[tenant]

    def is_below_its_share(self, tenant: str, num_slots: int) -> bool:
        """Whether the tenant would hold no more than its share of the running slots with one more."""
        return self.num_running[tenant] + 1 <= self._share(tenant, num_slots)

    def above_their_share(self, num_slots: int) -> set[str]:
        """Tenants that hold more than their share of the running slots."""
        return {tenant for tenant, held in self.num_running.items() if held > self._share(tenant, num_slots)}

    def snapshot(self, most: int) -> tuple[TenantSnapshot, ...]:
        """The `most` tenants that have most requests."""
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
        # One running slot is everybody's due, however many tenants there are and however little weight this one has.
        return max(1.0, num_slots * self._weights[tenant] / self._total_weight)

    def _competes(self, tenant: str) -> bool:
        return self.num_living[tenant] > self.num_running[tenant] and not self.is_at_its_limit(tenant)

    def _lift(self, tenant: str) -> None:
        """The tenant begins to compete.

        If nobody else does, the latest to get a running slot tells how far things are.
        """
        floor = min(
            (self._served[other] for other in self.num_living if other != tenant and self._competes(other)),
            default=self._served.get(self._latest, 0.0),
        )
        self._served[tenant] = max(self._served[tenant], floor)

    def _forget_idle_tenants(self) -> None:
        while len(self._served) - len(self.num_living) > _MAX_REMEMBERED:
            oldest_idle = next(tenant for tenant in self._served if tenant not in self.num_living)
            del self._served[oldest_idle]
