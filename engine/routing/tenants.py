"""Tenants over several engines: what all of them were served, and how many of their requests run at once.

Each engine's scheduler is fair by itself (`engine.scheduler.waiting_queue`). Told what the others have served, it is
fair by what the tenants got of all. A tenant's limit is kept here: what is beyond it is given to no engine until
something of that tenant has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from engine.messages import EngineCoreRequest


class Prompt(Protocol):
    """The choices of one prompt: an `engine.commands.AddRequests`."""

    choices: list[EngineCoreRequest]


class FleetShares:
    """What engines 0 .. `size` - 1 have served since the others were told, in prompt tokens by the tenant's weight."""

    def __init__(self, size: int) -> None:
        self._served: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(size)]

    def charge(self, engine: int, request: EngineCoreRequest, cost: float) -> None:
        """An engine has done something for this request."""
        self._served[engine][request.tenant] += cost / request.tenant_weight

    def take(self) -> list[dict[str, float]]:
        """For each engine what the others have served since this was asked before; nothing if there is one tenant."""
        total: Counter[str] = Counter()
        for served in self._served:
            total.update(served)
        if len(total) < 2:
            total.clear()
        elsewhere = [
            {tenant: rest for tenant, amount in total.items() if (rest := amount - own.get(tenant, 0.0)) > 0}
            for own in self._served
        ]
        for served in self._served:
            served.clear()
        return elsewhere


class TenantLimits:
    """Prompts of tenants that have as many choices under way as may run. Of one tenant the best priority is next."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._held: defaultdict[str, list[tuple[int, int, int, Prompt]]] = defaultdict(list)
        self._num_dropped: Counter[str] = Counter()  # of these, prompts without a choice
        self._prompts: dict[str, Prompt] = {}  # of the choices that are held
        self._numbers = count()

    @property
    def num_held(self) -> int:
        """Choices that wait here."""
        return len(self._prompts)

    @property
    def tenants(self) -> list[str]:
        """Who has something held."""
        return list(self._held)

    def hold(self, prompt: Prompt) -> None:
        """The choices of a prompt have come. They are under way when `next` has given them."""
        first = prompt.choices[0]
        heappush(self._held[first.tenant], (first.precedence, first.priority, next(self._numbers), prompt))
        self._prompts.update((choice.request_id, prompt) for choice in prompt.choices)

    def next(self, tenant: str) -> Prompt | None:
        """What may run now, if anything. More choices than the limit run if nothing else of the tenant does: where they
        run, the engine keeps it."""
        held = self._held.get(tenant, [])
        while held:
            choices = held[0][-1].choices
            limit, under_way = max((each.tenant_max_running for each in choices), default=0), self._under_way[tenant]
            if choices and 0 < limit < under_way + len(choices) and under_way:
                return None
            prompt = heappop(held)[-1]
            for choice in prompt.choices:
                del self._prompts[choice.request_id]
                self._under_way[tenant] += 1
            if prompt.choices:
                return prompt
            self._num_dropped[tenant] -= 1
        self._held.pop(tenant, None)
        self._num_dropped.pop(tenant, None)
        return None

    def drop(self, request_id: str) -> bool:
        """A choice is not wanted any more. Returns whether it was held."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            tenant = prompt.choices[0].tenant
            prompt.choices = [each for each in prompt.choices if each.request_id != request_id]
            if not prompt.choices:
                self._drop_prompts(tenant)
        return prompt is not None

    def _drop_prompts(self, tenant: str) -> None:
        """One more prompt is not wanted any more. They keep no memory until their turn, which may be far away."""
        self._num_dropped[tenant] += 1
        if self._num_dropped[tenant] > len(self._held[tenant]) // 2:
            self._held[tenant] = [each for each in self._held[tenant] if each[-1].choices]
            heapify(self._held[tenant])
            self._num_dropped[tenant] = 0

    def end(self, tenant: str) -> None:
        """A choice that was under way has ended."""
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]

    def late(self, now: float) -> Iterator[str]:
        """Those held whose deadline has passed."""
        for prompt in {id(each): each for each in self._prompts.values()}.values():
            for choice in prompt.choices:
                deadlines = [each for each in (choice.deadline, choice.first_token_deadline) if each is not None]
                if deadlines and min(deadlines) <= now:
                    yield choice.request_id
