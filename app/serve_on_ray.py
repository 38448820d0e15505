"""Headrace as an application of Ray Serve: a replica is a whole server without a port, behind Serve's proxies.

`deploy/ray/serve.yaml` names `build`. Serve checks a replica's health by what `/livez` says, and sends it nothing
before its model is loaded; `app.ray_policies` has who gets a request, and how many replicas there are. Needs the extra
`ray`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.applications import Starlette

from app.application import create_app
from app.server import Server
from app.setting_sources import Given, check_settings, load_settings
from engine.end_when_stopped import end_when_stopped

DRAIN_MARGIN = 5.0  # seconds beyond `drain_timeout` until Serve kills a replica that it has told to end
NO_LIMIT = 100_000  # of Serve's own: `max_queued_requests` refuses, with a Retry-After


@serve.ingress()
class Replica:
    """One server, made of settings as a TOML file has them. The environment has the others: keys belong there."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        end_when_stopped()

    def __serve_build_asgi_app__(self) -> Starlette:
        application = create_app(load_settings(self._settings, spelled=_spelled))
        self._server: Server = application.state.server
        return application

    async def check_health(self) -> None:
        """Raises if `/livez` would say 503. Serve asks a first time before it sends requests."""
        await self._server.loaded.wait()
        if not self._server.is_alive:
            raise RuntimeError("the engine makes no progress")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `QueuedSeconds`."""
        return {"queued_seconds": self._server.admission.queued_seconds, "running_share": self._server.running_share}

    def record_routing_stats(self) -> dict[str, str]:
        """For `HeadraceRouter`."""
        costs = self._server.admission.wait.costs
        return {} if costs is None else {"step_costs": costs.to_json().decode()}


def build(arguments: dict[str, Any]) -> serve.Application:
    """What Serve runs. `arguments` are Headrace's settings; what Serve itself is told of deployments goes before the
    defaults here. Raises `SettingsError`."""
    settings = check_settings({name: Given(value, _spelled(name)) for name, value in arguments.items()})
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
            policy=AutoscalingPolicy(policy_function="app.ray_policies:QueuedSeconds"),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="app.ray_policies:HeadraceRouter",
            request_router_kwargs={"max_num_seqs": settings.max_num_seqs},
        ),
    )(Replica)
    return deployment.bind(arguments)


def _spelled(setting: str) -> str:
    return f"args.{setting}"
