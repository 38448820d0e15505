"""The shares and limits of tenants over several engines.

1. Each scheduler (`engine.scheduler.waiting_queue`) also charges tenants for service on other engines, so that tenants
   have fair shares of all engines together.
2. Requests beyond a tenant's limit are held here, until other requests of the tenant have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from engine.messages import EngineCoreRequest


class Prompt(Protocol):
    """The choices of one prompt; an `engine.commands.AddRequests`."""

    choices: list[EngineCoreRequest]


class FleetShares:
    """The service by engines 0 .. `size` - 1 that the others do not know of yet, in prompt tokens / tenant weight."""

    def __init__(self, size: int) -> None:
        self._served: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(size)]

    def charge(self, engine: int, request: EngineCoreRequest, cost: float) -> None:
        self._served[engine][request.tenant] += cost / request.tenant_weight

    def take(self) -> list[dict[str, float]]:
        """Return for each engine the service by the others since the last call; nothing if there is only one tenant."""
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
    """The prompts held because their tenant's limit is reached, by priority, and the number of running choices."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._held: defaultdict[str, list[tuple[int, int, int, Prompt]]] = defaultdict(list)
        self._num_dropped: Counter[str] = Counter()  # held prompts that have lost all choices
        self._prompts: dict[str, Prompt] = {}  # by the ids of held choices
        self._numbers = count()

    @property
    def num_held(self) -> int:
        return len(self._prompts)

    @property
    def tenants(self) -> list[str]:
        return list(self._held)

    def hold(self, prompt: Prompt) -> None:
        """Hold the choices of a new prompt until `next` returns them."""
        first = prompt.choices[0]
        heappush(self._held[first.tenant], (first.precedence, first.priority, next(self._numbers), prompt))
        self._prompts.update((choice.request_id, prompt) for choice in prompt.choices)

    def next(self, tenant: str) -> Prompt | None:
        """Return a held prompt that may run now; its choices count as running from now on. None if none may.

        A prompt with more choices than the limit may run if no other choice of the tenant runs; then the engine
        enforces the limit."""
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
        """Drop a choice. Return False if it was not held."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            tenant = prompt.choices[0].tenant
            prompt.choices = [each for each in prompt.choices if each.request_id != request_id]
            if not prompt.choices:
                self._drop_prompts(tenant)
        return prompt is not None

    def _drop_prompts(self, tenant: str) -> None:
        """Count a dropped prompt. If most held prompts are dropped ones, free them now instead of at their turns."""
        self._num_dropped[tenant] += 1
        if self._num_dropped[tenant] > len(self._held[tenant]) // 2:
            self._held[tenant] = [each for each in self._held[tenant] if each[-1].choices]
            heapify(self._held[tenant])
            self._num_dropped[tenant] = 0

    def end(self, tenant: str) -> None:
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]

    def late(self, now: float) -> Iterator[str]:
        """Yield the held choices that are past their deadlines."""
        for prompt in {id(each): each for each in self._prompts.values()}.values():
            for choice in prompt.choices:
                deadlines = [each for each in (choice.deadline, choice.first_token_deadline) if each is not None]
                if deadlines and min(deadlines) <= now:
                    yield choice.request_id
