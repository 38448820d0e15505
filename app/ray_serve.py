"""The application on Ray Serve, with its routing and scaling policies.

Serve imports it in its proxies and its controller to apply the policies, so importing it loads neither the web server
nor the engine.
"""

from __future__ import annotations

import hashlib
import secrets
from asyncio import Future
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette

from app.application import create_app
from app.config.sources import Given, check_settings, load_settings
from app.serving.model_pool import ModelPool
from app.serving.process import check_socket_settings
from engine.child_main import end_when_stopped
from engine.costs.table import StepCostTable
from engine.routing.router import MAX_QUEUED_SECONDS, Router, wanted_engines

# A proxy places a request before it has the body. So each prompt is assumed to have this many tokens and to begin like
# the other prompts of its session.
PROMPT_TOKENS = 512


class QueuedSeconds:
    """The scaling policy: so many replicas that no request is expected to wait for longer than `max_queued_seconds`."""

    def __init__(self, max_queued_seconds: float = MAX_QUEUED_SECONDS) -> None:
        self._max_queued_seconds = max_queued_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        queued, running = (sum(metrics.get(name, {}).values()) for name in ("queued_seconds", "running_share"))
        return wanted_engines(queued, running, self._max_queued_seconds), {}


class HeadraceRouter(RequestRouter):
    """The routing policy: a request goes to the replica that has cached its session, unless that has much work, and
    otherwise to the replica with the least work, in seconds by the replica's own step costs. Each proxy counts only the
    requests that it has sent."""

    def initialize_state(self, max_num_seqs: int = 64, max_replicas: int = 1024) -> None:
        """`max_num_seqs`: running slots of a replica."""
        self._policy = Router(max_replicas, max_num_seqs, first=secrets.randbelow(max_replicas))
        self._numbers: dict[ReplicaID, int] = {}
        self._unused = list(range(max_replicas))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the present replicas and their step costs. Called at every change."""
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
        """Return the best replica, then all others, for the case that it cannot be reached."""
        by_number = {
            self._numbers[each.replica_id]: each for each in candidate_replicas if each.replica_id in self._numbers
        }
        if pending_request is None or not by_number:
            return [candidate_replicas]
        request_id, session_id = pending_request.metadata.internal_request_id, pending_request.metadata.session_id
        self._policy.ended(request_id, by_itself=False)  # it may have been refused by another replica
        pending_request.future.add_done_callback(partial(self._forget_cancelled, request_id))
        prompt = hashlib.sha256((session_id or request_id).encode()).digest() * (PROMPT_TOKENS // 32)
        best = by_number[self._policy.choose([request_id], prompt, list(by_number))]
        return [[best], [each for each in candidate_replicas if each is not best]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._policy.ended(internal_request_id, by_itself=True)

    def _forget_cancelled(self, request_id: str, placed: Future[RunningReplica]) -> None:
        """Forget a request if its client left before a replica was found; Serve does not report its end."""
        if placed.cancelled():
            self._policy.ended(request_id, by_itself=False)

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._policy.forget(number)
            self._unused.append(number)


# --------------------------------------------------------------------------------------------------------- serve on ray
# Headrace as an application of Ray Serve: a replica is a whole server without a port, behind Serve's proxies.
#
# `deploy/ray/serve.yaml` names `build`. Serve checks a replica's health by `check_health`, and sends it no request
# before its model is loaded. The policies above choose the replica of a request and the number of replicas. Needs the
# extra `ray`.


DRAIN_MARGIN = 5.0  # seconds after `drain_timeout` until Serve kills a replica that it has asked to end
NO_LIMIT = 100_000  # requests; Headrace's own `max_queued_requests` refuses with a Retry-After


@serve.ingress()
class Replica:
    """One server. `settings` are as in a TOML file; others, such as keys, come from the environment."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        end_when_stopped()

    def __serve_build_asgi_app__(self) -> Starlette:
        application = create_app(load_settings(self._settings, spelled=_spelled))
        self._pool: ModelPool = application.state.pool
        return application

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine makes no progress. Serve calls it before it sends the first request."""
        await self._pool.server.loaded.wait()
        if not self._pool.is_alive:
            raise RuntimeError("the engine makes no progress")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics of `QueuedSeconds`."""
        model = self._pool.current
        return {"queued_seconds": model.admission.queued_seconds, "running_share": model.running_share}

    def record_routing_stats(self) -> dict[str, str]:
        """Return the step costs for `HeadraceRouter`."""
        costs = self._pool.current.admission.wait.costs
        return {} if costs is None else {"step_costs": costs.to_json().decode()}


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application that Serve runs. `arguments` are Headrace's settings; Serve's own configuration of the
    deployment overrides the defaults here. Raises `SettingsError`."""
    settings = check_settings({name: Given(value, _spelled(name)) for name, value in arguments.items()})
    check_socket_settings(settings)
    deployment = serve.deployment(
        name="headrace",
        max_ongoing_requests=NO_LIMIT,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_timeout + DRAIN_MARGIN,
        health_check_period_s=2.0,
        health_check_timeout_s=settings.stall_limit,
        autoscaling_config=AutoscalingConfig(
            min_replicas=1,
            max_replicas=8,
            look_back_period_s=15.0,
            upscale_delay_s=5.0,
            downscale_delay_s=300.0,
            policy=AutoscalingPolicy(policy_function="app.ray_serve:QueuedSeconds"),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="app.ray_serve:HeadraceRouter",
            request_router_kwargs={"max_num_seqs": settings.max_num_seqs},
        ),
    )(Replica)
    return deployment.bind(arguments)


def _spelled(setting: str) -> str:
    return f"args.{setting}"
