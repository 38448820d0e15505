"""Ranks as Ray actors on several machines.

Ray places and starts the ranks, and reports their death; nothing else goes through Ray. Plans and outputs cross over
ZMQ, to each rank with keys that were made for it. What a rank does is `gpu.parallel.rank`'s, what its driver does
`gpu.parallel.multiproc`'s.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

import msgspec
import ray
import zmq
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.child_main import end_when_stopped
from engine.errors import ConfigError, ErrorInWords, HeadraceError, RankLost
from gpu.checkpoint import ModelFiles
from gpu.checkpoint import Progress as ReportProgress
from gpu.model_loader import library_for, resolve_device
from gpu.parallel.links import StageLink
from gpu.parallel.messages import Failed, Group, RankSetup, Up, decode_up, encode
from gpu.parallel.multiproc import MultiprocExecutor, RankProcess
from gpu.parallel.rank import Rank
from gpu.parallel.rank_main import in_few_words, join_on_this_machine, load
from gpu.parallel.secure_sockets import CurveServer, Keys, Socket, connect
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout

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
        device = options.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        num_threads = options.num_threads or 1
        options = replace(options, device=device, num_threads=num_threads)
        self._room = {"CPU": float(num_threads)} if device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
        progress(f"Waiting for {layout.world_size} x {self._room} on the Ray cluster", 0, None)
        self._group: PlacementGroup = placement_group([self._room] * layout.world_size, strategy="PACK")
        try:
            ray.get(self._group.ready())
            self._nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
            nodes = {node["NodeID"]: node for node in ray.nodes()}
            self._hosts = {name: node["NodeManagerHostname"] for name, node in nodes.items()}
            if layout.world_size == 1:  # other engines of one rank may be on its machine, each with its cores
                num_cores = nodes[self._nodes[0]]["Resources"].get("CPU", self._room["CPU"])
                options = replace(options, kv_cache_share=min(1.0, self._room["CPU"] / num_cores))
            super().__init__(model, options, layout, progress, **local)
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
            # On a thread: on the main thread Ray would replace the process's handler of SIGTERM.
            address = os.environ.get("RAY_ADDRESS", "auto")
            with ThreadPoolExecutor(1) as thread:
                thread.submit(ray.init, address, log_to_driver=False, logging_level=logging.ERROR).result()
        except ConnectionError as error:
            allowed = "it needs a Ray cluster, and this machine is not one of any"
            hint = "after `ray start --head` it works, and with RAY_ADDRESS for another"
            raise ConfigError("executor", "ray", allowed=allowed, hint=hint) from error


# ------------------------------------------------------------------------------------------------------------- ray rank
# One rank in a Ray actor, and its messages to its driver and to neighbouring ranks.
#
# What goes between machines goes over ZMQ, to each with keys that were made for it; what tensor ranks say within a
# layer over the memory of their machine, if they have one in common, else over torch.distributed.


SILENCE_SECONDS = 10.0  # after which a rank has lost its driver, or its neighbour
MEETING_SECONDS = 60.0  # that a neighbour's process may take longer to start
PIECE = 64 * 2**20  # bytes: what is longer goes in several; ZMQ takes no more than `MAX_MESSAGE_BYTES` at once
SAYS, HAS_MADE_A_STEP, LAST_WORDS = b"says", b"step", b"words"  # what a message from a rank is


class Told(msgspec.Struct):
    """What a rank is started with."""

    setup: RankSetup
    plans: str
    lifeline: str
    keys: Keys
    store: tuple[str, int] | None  # torch's, in which the tensor ranks of several machines find each other


class Meeting(msgspec.Struct):
    """Where the first tensor rank of a stage is found: by the others of its machine, and by each of the next stage."""

    segment: str
    store: str
    links: list[tuple[str, Keys]]


class RankActor:
    """A process that is nothing but one rank, and its inbox."""

    def meet(self, num_behind: int) -> bytes:
        """A `Meeting`, for so many ranks of the stage behind. Asked of the first rank of a stage, before `run`."""
        own = f"/proc/{os.getpid()}/fd"
        segment, store = (f"{own}/{os.memfd_create(name)}" for name in ("headrace-ranks", "headrace-store"))
        server = CurveServer(ray.util.get_node_ip_address()).__enter__()  # until the process ends
        bound = [server.bind(zmq.PUSH) for _ in range(num_behind)]
        self._behind = [socket for socket, _ in bound]
        links = [(address, server.new_keys()) for _, address in bound]
        return msgspec.msgpack.encode(Meeting(segment, store, links))

    def run(self, message: bytes, *meetings: bytes) -> NoReturn:
        """Until it ends. The last of the `Meeting`s is that of its stage, the one before, that of the stage before."""
        end_when_stopped()
        told = msgspec.msgpack.decode(message, type=Told)
        self._plans = _connected(told, told.plans)
        threading.Thread(target=_end_with_driver, args=(told,), name="lifeline", daemon=True).start()
        try:
            self._serve(told, [msgspec.msgpack.decode(each, type=Meeting) for each in meetings])
        except BaseException as error:
            self._send(LAST_WORDS, in_few_words(error).encode())
            traceback.print_exc()
        self._plans.close(linger=1000)
        self._plans.context.term()
        os._exit(1)  # neither a library's thread nor its exit handler may hold up the end

    def _serve(self, told: Told, meetings: list[Meeting]) -> None:
        layout, link = told.setup.layout, None
        if layout.pipeline_parallel_size > 1:
            before = None if layout.is_first_stage else StageReader(layout.rank, *meetings[0].links[layout.tp_rank])
            after = StageWriter(self._behind) if layout.tp_rank == 0 and not layout.is_last_stage else None
            link = StageLink(before, after, is_last=layout.is_last_stage)
        rank = Rank(layout, self, self._tell, self.count_step, link)
        try:
            join = partial(_join, told.store, meetings[-1])
            worker, cost, vocab_size = load(told.setup, rank, self._tell, join)
        except HeadraceError as error:
            self._tell(Failed(-1, ErrorInWords.of(error)))
            raise
        rank.serve(worker, cost, vocab_size, lambda step: None)  # steps are not broken off

    def _tell(self, message: Up) -> None:
        self._send(SAYS, encode(message))

    @property
    def has_message(self) -> bool:
        return bool(self._plans.poll(0))

    def read(self) -> bytes:
        return self._plans.recv()

    def count_step(self) -> None:
        self._send(HAS_MADE_A_STEP)

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        self._plans.send_multipart([kind, data])


class StageReader:
    """From the stage before. What it sends waits here for as long as this stage is behind."""

    def __init__(self, rank: int, address: str, keys: Keys) -> None:
        """Raises RankLost if it cannot be reached."""
        self._rank = rank
        self._socket: Socket = zmq.Context.instance().socket(zmq.PULL)
        self._ends: Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self._socket, address, keys)
        if not self._socket.poll(round(1000 * MEETING_SECONDS)):
            raise self._lost("cannot reach the stage before it")
        self._socket.recv()

    def read(self) -> bytes:
        """Raises RankLost if the connection is lost."""
        while not self._socket.poll(1000):
            if self._ends.poll(0):
                time.sleep(SILENCE_SECONDS)  # that a rank has ended is the driver's to find, and to say which
                raise self._lost("has lost its connection to the stage before it")
        return b"".join(self._socket.recv_multipart())

    def _lost(self, why: str) -> RankLost:
        return RankLost(self._rank, os.uname().nodename, why)


class StageWriter:
    """To all ranks of the stage behind."""

    def __init__(self, sockets: list[Socket]) -> None:
        """Waits for them: who connects is let in by a thread here, which imports could keep from it for too long."""
        self._sockets = sockets
        for socket in sockets:
            socket.send(b"")

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """There is always room."""
        pieces = [message[start : start + PIECE] for start in range(0, len(message), PIECE)]
        for socket in self._sockets:
            socket.send_multipart(pieces)


def _join(
    store: tuple[str, int] | None, meeting: Meeting, setup: RankSetup, options: WorkerOptions, files: ModelFiles
) -> Any:
    if store is None:  # all of its stage are on this machine
        setup.segment, setup.store = (os.open(path, os.O_RDWR) for path in (meeting.segment, meeting.store))
        return join_on_this_machine(setup, options, files)
    if library_for(files.config, options, resolve_device(options.device)) is not None:
        allowed = "tensor ranks of the CPU library share a machine's memory, and these are on several machines"
        hint = "dtype=float32 works, or machines with room for as many ranks"
        raise ConfigError("tensor_parallel_size", setup.layout.tensor_parallel_size, allowed=allowed, hint=hint)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from gpu.models.communicators import TorchCommunicator

    return TorchCommunicator(TCPStore(*store), setup.layout, resolve_device(options.device))


def _connected(told: Told, address: str) -> Socket:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.routing_id = name_of(told.setup.layout.rank)
    connect(socket, address, told.keys)
    return socket


def _end_with_driver(told: Told) -> NoReturn:
    lifeline = _connected(told, told.lifeline)
    lifeline.send(b"")
    while lifeline.poll(round(1000 * SILENCE_SECONDS)):
        lifeline.recv()
    os._exit(1)


def name_of(rank: int) -> bytes:
    return b"rank-%d" % rank
