"""How tenants share the queue: half of it is kept for those that hold less than their part, the rest is for whoever
comes first.

A tenant's part is its reserve: by weight, and of places at least one, where there is one for each tenant. What is kept
is not handed out to others even if nobody asks for it, so whoever comes finds its reserve free. A lone tenant has
the whole queue. Everything is counted as it changes; nothing here goes over all tenants after the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from app.tenants import Tenant


def place_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Places for each tenant: one, and of the rest of the half by weight. None that its own limit makes useless."""
    reserves = _reserves(limit, tenants, least=1)
    own_limits = {tenant.name: tenant.max_queued_requests for tenant in tenants}
    return {name: min(reserve, own_limits[name] or reserve) for name, reserve in reserves.items()}


def token_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Tokens for each tenant, by weight."""
    return _reserves(limit, tenants, least=0)


def _reserves(limit: int, tenants: Collection[Tenant], least: int) -> dict[str, int]:
    if len(tenants) < 2:
        return {}
    by_weight = max(0, limit // 2 - least * len(tenants))
    total = sum(tenant.weight for tenant in tenants)
    return {tenant.name: least + int(by_weight * (tenant.weight / total)) for tenant in tenants}


class SharedRoom:
    """One measure of the queue, places or tokens: what is taken of it, by whom, and what is kept for whom.

    `total` never exceeds `limit` as long as nothing is taken that does not fit.
    """

    def __init__(self, limit: int, reserves: Mapping[str, int]) -> None:
        self.limit = limit
        self.total = 0
        self._taken: Counter[str] = Counter()
        self.keep(reserves)

    def keep(self, reserves: Mapping[str, int]) -> None:
        """From now on these are the reserves. What is taken stays taken."""
        self._reserves = reserves
        self._promised = sum(reserves.values())
        # Of more reserves than there is room, half of the room is kept for those who come first.
        self._kept = self._promised if self._promised <= self.limit else self.limit // 2
        # What tenants have taken within their reserves.
        self._inside = sum(min(taken, reserves.get(tenant, 0)) for tenant, taken in self._taken.items())

    def taken_by(self, tenant: str) -> int:
        """What this tenant has taken."""
        return self._taken[tenant]

    def kept_from(self, tenant: str) -> int:
        """What is kept for others just now."""
        own = max(0, self._reserves.get(tenant, 0) - self._taken[tenant])
        return max(0, self._kept - self._inside - own)

    def most_for(self, tenant: str) -> int:
        """What this tenant could take if nobody else had taken anything."""
        return self.limit - max(0, self._kept - self._reserves.get(tenant, 0))

    def fits(self, tenant: str, amount: int) -> bool:
        """Whether the tenant may take so much more: it stays within its reserve, or leaves what is kept for others."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        if taken + amount <= reserve and self._kept == self._promised:
            return True
        inside = min(taken + amount, reserve) - min(taken, reserve)
        return self.total + amount + max(0, self._kept - self._inside - inside) <= self.limit

    @property
    def is_full(self) -> bool:
        """Whether no tenant at all may take any more."""
        inside = 1 if self._inside < self._promised else 0  # somebody has not used up its reserve
        if inside and self._kept == self._promised:
            return False
        return self.total + 1 + max(0, self._kept - self._inside - inside) > self.limit

    def take(self, tenant: str, amount: int) -> None:
        """Account for what a tenant takes, or gives back if it is negative."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        self.total += amount
        self._inside += min(taken + amount, reserve) - min(taken, reserve)
        self._taken[tenant] = taken + amount
        if not self._taken[tenant]:
            del self._taken[tenant]
