"""The server's admission, asked on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack

from app.admission import Admission, QueueTicket
from app.settings import Settings
from app.tenants import ANONYMOUS, Tenant
from engine.messages import EngineCoreRequest
from engine.scheduler.step_cost import StepCostTable
from protocol.errors import ApiError


class AdmissionDoor:
    """An `engine.simulation.simulation.Door` that takes in whom the server would take in."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        table: StepCostTable | None = None,
        num_kv_tokens: float = math.inf,
        tenants: Collection[Tenant] = (ANONYMOUS,),
    ) -> None:
        """`num_kv_tokens` fit into the caches of all engines together."""
        self._admission = Admission(settings, tenants=tenants, clock=clock)
        self._admission.wait.num_kv_tokens = num_kv_tokens
        if table is not None:
            self._admission.wait.set_costs(table)
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._clock = clock

    def enter(self, request: EngineCoreRequest) -> AdmittedPlace | str:
        deadlines = [each for each in (request.deadline, request.first_token_deadline) if each is not None]
        place = AdmittedPlace()
        try:
            place.ticket = place.scope.enter_context(
                self._admission.queue(
                    self._tenants[request.tenant],
                    choices=1,
                    tokens=len(request.prompt_token_ids),
                    timeout=min(deadlines) - self._clock() if deadlines else None,
                    max_tokens=request.sampling.max_tokens,
                )
            )
        except ApiError as refusal:
            return f"HTTP {refusal.status} {refusal.code}"
        place.ticket.count_tokens(len(request.prompt_token_ids))
        return place


class AdmittedPlace:
    """A ticket of the queue, held for as long as the request lives."""

    ticket: QueueTicket

    def __init__(self) -> None:
        self.scope = ExitStack()

    def begin(self) -> None:
        """It got its first token."""
        self.ticket.begin()

    def leave(self, num_tokens: int) -> None:
        """It has ended, with so many tokens."""
        self.ticket.end(num_tokens)
        self.scope.close()
