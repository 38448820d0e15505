"""Who gives way when somebody has to: the running request that is preempted for others.

A tenant's priorities say which of its own requests gives way, and never which tenant. Otherwise whoever calls
everything urgent would keep its memory and take that of all others. Used by the Scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.fairness import TenantShares
from engine.scheduler.request import Request


def worst_ranked(candidates: Iterable[Request], shares: TenantShares, num_running: int) -> Request | None:
    """The first of these running requests to give way: of the worst precedence, of a tenant that holds more than its
    share of the running slots in use, of the tenant of the latest arrival, and of its requests the worst by priority
    and arrival. None if there is nobody.

    Arrival decides between tenants, and not what they were served: that changes with every step, and two tenants would
    take each other's memory in turns, computing everything twice. The one that arrived first goes on to its end.
    """
    left = list(candidates)
    if len(left) > 1:
        worst = max(request.precedence for request in left)
        left = [request for request in left if request.precedence == worst]
        above = shares.above_their_share(num_running)
        left = [request for request in left if request.tenant in above] or left
        tenant = max(left, key=_arrival).tenant
        left = [request for request in left if request.tenant == tenant]
    return max(left, key=_rank, default=None)


def _arrival(request: Request) -> int:
    return request.sequence_number


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
