"""Which of Ray Serve's replicas gets a request, and how many there should be: Headrace's policies in Serve's words.

Imported where Serve decides, in its proxies and its controller, so it brings neither the web server nor the engine.
"""

from __future__ import annotations

import hashlib
import secrets
from asyncio import Future
from functools import partial
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.routing.fleet_size import MAX_QUEUED_SECONDS, wanted_engines
from engine.routing.router import Router
from engine.scheduler.step_cost import StepCostTable

# A proxy hands on a request's head before it has its body. So a prompt is as long as this, in tokens, and begins like
# those of its session.
PROMPT_TOKENS = 512


class QueuedSeconds:
    """As many replicas as it takes for nobody to wait for longer than `max_queued_seconds`, by what replicas expect."""

    def __init__(self, max_queued_seconds: float = MAX_QUEUED_SECONDS) -> None:
        self._max_queued_seconds = max_queued_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        queued, running = (sum(told.get(name, {}).values()) for name in ("queued_seconds", "running_share"))
        return wanted_engines(queued, running, self._max_queued_seconds), {}


class HeadraceRouter(RequestRouter):
    """Requests of one session go where its beginnings are cached, unless there is much to do; all others where least is
    to do, in seconds by each replica's own costs. Every proxy counts what it has sent itself."""

    def initialize_state(self, max_num_seqs: int = 64, max_replicas: int = 1024) -> None:
        """`max_num_seqs`: running slots of a replica."""
        self._policy = Router(max_replicas, max_num_seqs, first=secrets.randbelow(max_replicas))
        self._numbers: dict[ReplicaID, int] = {}
        self._unused = list(range(max_replicas))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with all there are whenever one comes, goes, or says something new of itself."""
        super().update_replicas(replicas)
        for replica in replicas:
            if replica.replica_id not in self._numbers:
                self._numbers[replica.replica_id] = self._unused.pop(0)
            if costs := replica.routing_stats.get("step_costs"):
                self._policy.set_costs(self._numbers[replica.replica_id], StepCostTable.from_json(costs.encode()))
        for gone in self._numbers.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one, then all others: where it cannot be reached, any will do."""
        by_number = {
            self._numbers[each.replica_id]: each for each in candidate_replicas if each.replica_id in self._numbers
        }
        if pending_request is None or not by_number:
            return [candidate_replicas]
        request_id, session_id = pending_request.metadata.internal_request_id, pending_request.metadata.session_id
        self._policy.ended(request_id, by_itself=False)  # it was sent to one that has refused it
        pending_request.future.add_done_callback(partial(self._forget_cancelled, request_id))
        prompt = hashlib.sha256((session_id or request_id).encode()).digest() * (PROMPT_TOKENS // 32)
        best = by_number[self._policy.choose([request_id], prompt, list(by_number))]
        return [[best], [each for each in candidate_replicas if each is not best]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._policy.ended(internal_request_id, by_itself=True)

    def _forget_cancelled(self, request_id: str, placed: Future[RunningReplica]) -> None:
        """Of a client that has left before a replica was found, Serve says nothing more."""
        if placed.cancelled():
            self._policy.ended(request_id, by_itself=False)

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._policy.forget(number)
            self._unused.append(number)
