"""Who gives way when somebody has to: the running request that is preempted for others.

A tenant's priorities say which of its own requests gives way, and never which tenant. Otherwise whoever calls
everything urgent would keep its memory and take that of all others. Used by the Scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.scheduler.request import Request
from engine.scheduler.request_table import RequestTable


def worst_ranked(table: RequestTable, candidates: Iterable[Request]) -> Request | None:
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
        above = table.shares.above_their_share(len(table.running))
        left = [request for request in left if request.tenant in above] or left
        tenant = max(left, key=_arrival).tenant
        left = [request for request in left if request.tenant == tenant]
    return max(left, key=_rank, default=None)


def bystander(table: RequestTable, only: Collection[str] | None) -> Request | None:
    """While a step is restricted: a running request that may not run, the worst-ranked one."""
    if only is None:
        return None
    return worst_ranked(table, (request for request in table.running.values() if request.request_id not in only))


def who_makes_room(
    table: RequestTable, newcomer: Request, slots: int, admitted: Collection[Request], only: Collection[str] | None
) -> Request | None:
    """The running request that gives its running slot and blocks to a waiting one, if any has to.

    While a step is restricted that is whoever may not run. Otherwise it is the worst-ranked request of a tenant
    above its share, if the newcomer's tenant is below its own and was served no more: without this, a tenant that
    fills all running slots with long generations would shut everybody else out until they end.
    """
    shares = table.shares
    if only is not None:
        return bystander(table, only)
    if not shares.is_below_its_share(newcomer.tenant, slots):
        return None
    served = shares.served(newcomer.tenant)
    above = shares.above_their_share(slots)
    candidates = (
        request
        for request in table.running.values()
        if request.tenant in above
        and (newcomer.precedence, served) <= (request.precedence, shares.served(request.tenant))
        and request not in admitted
    )
    return worst_ranked(table, candidates)


def _arrival(request: Request) -> int:
    return request.sequence_number


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
