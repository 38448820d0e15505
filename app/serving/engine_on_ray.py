"""An engine in an actor of Ray's: a process on a machine of its cluster, which the front end reaches over TCP.

Ray places it, starts it and tells of its death; nothing else goes through Ray. An engine of several ranks has them
where Ray finds room, and its scheduler in the actor. Needs the extra `ray`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import msgspec
import ray

from app.config.settings import Settings
from engine.child_main import end_when_stopped
from engine.core.core import EngineCore
from engine.errors import EngineLost, RankLost
from engine.transport.channel import wait_done
from engine.transport.process_client import ProcessClient
from engine.transport.remote import Launched, RemoteLink
from engine.transport.remote_core import serve_remote
from engine.transport.wire import Ends, Report


class EngineActor:
    """A process that is nothing but one engine."""

    def host(self) -> str:
        """The machine that it is on, by name."""
        return str(_node()["NodeManagerHostname"])

    def run(self, ends: bytes) -> NoReturn:
        """Until it ends. `ends` are an `Ends`."""
        end_when_stopped()
        num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
        share = min(1.0, num_cpus / _node()["Resources"].get("CPU", 1.0)) or 1.0

        def build(setup: dict[str, Any], report: Report) -> EngineCore:
            engine_main = import_module("app.serving.engine_main")  # it imports `loading`, which imports this module
            return engine_main.build(setup | {"kv_cache_share": share}, report)

        serve_remote(build, msgspec.msgpack.decode(ends, type=Ends))


def make_ray_client(settings: Settings, index: int | None, report: Report) -> ProcessClient:
    """An engine that Ray places, with a device or the cores of `num_threads`. This process has joined the cluster."""
    if settings.device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        settings = settings.model_copy(update={"device": device})
    if settings.num_ranks == 1 and settings.num_threads is None:
        settings = settings.model_copy(update={"num_threads": 1})
    setup = {"settings": settings.without_secrets(), "index": index}

    def launch(ends: Ends) -> Launched:
        report("Waiting for the Ray cluster to start an engine", 0, None)
        return _Actor(settings, ends)

    link = partial(RemoteLink, launch, ray.util.get_node_ip_address())
    return ProcessClient(link, setup, on_progress=report)


class _Actor:
    """A `Launched`. Whatever asks Ray does so on a thread of its own: it may take its time."""

    def __init__(self, settings: Settings, ends: Ends) -> None:
        self._is_one_rank = settings.num_ranks == 1
        num_threads = settings.num_threads or 1
        self._room: dict[str, Any] = {"num_cpus": 0}  # its ranks take theirs
        if self._is_one_rank:
            self._room = {"num_cpus": num_threads} if settings.device == "cpu" else {"num_cpus": 1, "num_gpus": 1}
        self._ends = msgspec.msgpack.encode(ends)
        self._host = "a machine of the Ray cluster"
        self._changed = threading.Event()
        self._ended: Future[str] = Future()
        threading.Thread(target=self._live, name="ray-engine", daemon=True).start()

    async def wait_ended(self) -> str:
        await wait_done(self._ended)
        return self._ended.result()

    def lost(self, how: str) -> EngineLost:
        if self._is_one_rank:
            return RankLost(0, self._host, f"is lost: {how}")
        return EngineLost(f"the engine on {self._host} is lost: {how}")

    def kill(self) -> None:
        self._changed.set()

    def _live(self) -> None:
        try:
            actor = ray.remote(EngineActor).options(**self._room).remote()
            actor.host.remote().future().add_done_callback(self._take_host)
            actor.run.remote(self._ends).future().add_done_callback(lambda _: self._changed.set())
            self._changed.wait()
            ray.kill(actor)
            how = "it has ended, as Ray says"
        except Exception as error:
            how = f"Ray could not start it: {error}"
        self._ended.set_result(how)

    def _take_host(self, host: Future[str]) -> None:
        if host.exception() is None:
            self._host = host.result()


def _node() -> dict[str, Any]:
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == own)
