"""Ranks on many machines: Ray places and starts them, as actors in a placement group, and tells of their death.

Nothing else goes through Ray. Plans and outputs cross over ZMQ, to each rank with keys that were made for it. What a
rank does is `gpu.parallel.rank`'s, what its driver does `gpu.parallel.multiproc`'s.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import msgspec
import ray
import zmq
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.curve import CurveServer
from engine.errors import ConfigError
from gpu.checkpoint import Progress as ReportProgress
from gpu.model_loader import WorkerOptions
from gpu.parallel.layout import Layout
from gpu.parallel.messages import Group, RankSetup, Up, decode_up
from gpu.parallel.multiproc import MultiprocExecutor, RankProcess
from gpu.parallel.ray_rank import HAS_MADE_A_STEP, LAST_WORDS, SAYS, RankActor, Told, name_of

LOOK_SECONDS = 0.05  # between two looks at whether a rank that is waited for still lives
PING_SECONDS = 0.1  # a connection that is gone is found by the next ping; to miss a machine takes Ray 15 s
LAST_WORDS_SECONDS = 0.1  # that they may be under way when Ray knows of an end


class RayExecutor(MultiprocExecutor):
    """Its ranks are where Ray finds room for them: near each other, a device or the cores of `num_threads` for each."""

    _ring: _Wire
    _store: Any = None  # of torch.distributed

    def __init__(
        self, model: dict[str, Any], options: WorkerOptions, layout: Layout, progress: ReportProgress, **local: Any
    ) -> None:
        num_threads = options.num_threads or 1
        self._room = {"CPU": float(num_threads)} if options.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
        progress(f"Waiting for {layout.world_size} x {self._room} on the Ray cluster", 0, None)
        self._group: PlacementGroup = placement_group([self._room] * layout.world_size, strategy="PACK")
        try:
            ray.get(self._group.ready())
            self._nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
            self._hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
            super().__init__(model, replace(options, num_threads=num_threads), layout, progress, **local)
        except BaseException:
            remove_placement_group(self._group)
            raise

    def shutdown(self) -> None:
        super().shutdown()
        remove_placement_group(self._group)

    def _make_ring(self, world_size: int) -> _Wire:
        return _Wire(world_size, self._lose)

    def _start_ranks(self, model: dict[str, Any], options: WorkerOptions) -> None:
        wire, layout, size = self._ring, self._layout, self._layout.tensor_parallel_size
        nodes = [self._nodes[index] for index in range(layout.world_size)]
        are_apart = [len({*nodes[first : first + size]}) > 1 for first in range(0, len(nodes), size)]  # by stage
        if any(are_apart):
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        actors = [self._make_actor(index) for index in range(len(nodes))]
        meetings = [first.meet.remote(0 if first is actors[-size] else size) for first in actors[::size]]
        memory = options.kv_cache_memory and options.kv_cache_memory // len(nodes)
        for index, (actor, node) in enumerate(zip(actors, nodes, strict=True)):
            share, stage = options.kv_cache_share / Counter(nodes)[node], index // size
            own = asdict(replace(options, kv_cache_share=share, kv_cache_memory=memory))
            setup = RankSetup(layout=replace(layout, rank=index), **model, options=own, ring=Group(0, []))
            store = (self._store.host, self._store.port) if are_apart[stage] else None
            told = Told(setup, wire.plans_address, wire.lifeline_address, wire.server.new_keys(), store)
            message = msgspec.msgpack.encode(told, enc_hook=int)  # sizes are ints of a kind of their own
            ended = actor.run.remote(message, *meetings[max(0, stage - 1) : stage + 1]).future()
            self._ranks.append(_ActorRank(index, actor, ended, self._lose))

    def _make_actor(self, index: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        room = {"num_cpus": self._room["CPU"], "num_gpus": self._room.get("GPU", 0)}
        return ray.remote(RankActor).options(**room, scheduling_strategy=where).remote()

    def _host_of(self, index: int) -> str:
        return self._hosts[self._nodes[index]]

    def _messages(self, timeout: float | None) -> list[tuple[RankProcess, Up]]:
        while not (came := self._ring.receive(LOOK_SECONDS if timeout is None else timeout)) and timeout is None:
            self._check()
        self._check()
        return [(self._ranks[index], message) for index, message in came]


class _Wire:
    """The driver's sockets to all ranks. What `RingWriter` is to ranks of one machine."""

    abandoned = 0  # steps are not broken off

    def __init__(self, world_size: int, on_lost: Callable[[int, str], None]) -> None:
        with ExitStack() as stack:
            self.server = stack.enter_context(CurveServer(ray.util.get_node_ip_address()))
            self._plans, self.plans_address = self.server.bind(zmq.ROUTER)
            self._lifeline, self.lifeline_address = self.server.bind(zmq.ROUTER)
            self._plans.router_mandatory = self._lifeline.router_mandatory = True
            self._resources = stack.pop_all()
        self._names = [name_of(index) for index in range(world_size)]
        self._num_steps = [0] * world_size
        self._last_words = [""] * world_size
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="rank-pings", daemon=True)
        self._pinging.start()

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Raises what `check` does of a rank that has gone."""
        for name in self._names:
            try:
                self._plans.send_multipart([name, message])
            except zmq.ZMQError:  # it has gone, which the next ping finds, too
                while True:
                    check()
                    self.receive(LOOK_SECONDS)

    def receive(self, timeout: float) -> list[tuple[int, Up]]:
        """What ranks have said, by rank; waits so long for the first."""
        came: list[tuple[int, Up]] = []
        while self._plans.poll(0 if came else round(timeout * 1000)):
            name, kind, data = self._plans.recv_multipart()
            index = self._names.index(name)
            if kind == SAYS:
                came.append((index, decode_up(data)))
            elif kind == HAS_MADE_A_STEP:
                self._num_steps[index] += 1
            elif kind == LAST_WORDS:
                self._last_words[index] = data.decode("utf-8", "replace")
        return came

    def steps(self, reader: int) -> int:
        return self._num_steps[reader]

    def last_words(self, reader: int) -> str:
        return self._last_words[reader]

    def close(self) -> None:
        self._closing.set()
        self._pinging.join()
        self._resources.close()

    def _ping(self) -> None:
        there: set[bytes] = set()
        while not self._closing.wait(PING_SECONDS):
            while self._lifeline.poll(0):
                there.add(self._lifeline.recv_multipart()[0])
            for name in sorted(there):
                try:
                    self._lifeline.send_multipart([name, b""])
                except zmq.ZMQError:
                    there.remove(name)
                    self._on_lost(self._names.index(name), "has ended, or its machine cannot be reached")


class _ActorRank:
    """What `RankChild` is to ranks of one machine."""

    pid = 0
    seconds_without_a_core = 0.0  # which another machine's kernel knows

    def __init__(self, index: int, actor: Any, ended: Future[None], on_end: Callable[[int, str], None]) -> None:
        self.index, self._actor, self._ended, self._on_end = index, actor, ended, on_end
        ended.add_done_callback(self._tell)

    def kill(self) -> None:
        ray.kill(self._actor)

    def wait_told(self) -> None: ...

    def join(self) -> None:
        self._ended.exception()

    def _tell(self, ended: Future[None]) -> None:
        threading.Timer(LAST_WORDS_SECONDS, self._on_end, (self.index, "has ended, as Ray says")).start()


def join_cluster() -> None:
    """The one that RAY_ADDRESS names, or that this machine is one of. Raises ConfigError."""
    if not ray.is_initialized():
        try:
            ray.init(os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            allowed = "it needs a Ray cluster, and this machine is not one of any"
            hint = "after `ray start --head` it works, and with RAY_ADDRESS for another"
            raise ConfigError("executor", "ray", allowed=allowed, hint=hint) from error
