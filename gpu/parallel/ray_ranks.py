"""Ranks as Ray actors on several machines.

1. Ray places and starts the ranks, and reports their end. Plans, outputs and activations go over ZMQ, with keys that
   were made for each rank.
2. Tensor ranks of one machine share its memory; those of several machines use torch.distributed.
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
from typing import Any, NoReturn, Self

import msgspec
import ray
import zmq
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from zmq.auth.thread import ThreadAuthenticator

from engine.child_main import end_when_stopped
from engine.errors import ConfigError, RankLost
from gpu.checkpoint import ModelFiles, Progress
from gpu.model_loader import library_for, resolve_device
from gpu.parallel.links import StageLink
from gpu.parallel.messages import Group, RankSetup, Up, decode_up, encode
from gpu.parallel.multiproc import MultiprocExecutor, RankProcess
from gpu.parallel.rank_main import AbortChecks, join_on_this_machine, public_text, serve
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from gpu.worker import Worker

LOOK_SECONDS = 0.05  # between two checks whether a rank that is waited for still runs
PING_SECONDS = 0.1  # a lost connection is found by the next ping; Ray needs 15 s to miss a machine
END_REASON_SECONDS = 0.1  # the reason of an end may arrive so much later than Ray's report of the end
# The limit of a message from another machine. All logits of a long prompt's step take about half of it.
MAX_MESSAGE_BYTES = 256 * 2**20
# ZMQ's threads probe each other, however busy Python is. A machine that is silent for longer counts as lost.
PROBE_SECONDS, SILENCE_SECONDS = 1.0, 5.0
HANDSHAKE_SECONDS = 5.0  # until a client has shown its key

Socket = zmq.Socket[bytes]


class RayExecutor(MultiprocExecutor):
    """An executor with ranks that Ray places near each other, with a device or `num_threads` cores for each."""

    _ring: _Wire
    _store: Any = None  # torch.distributed's

    def __init__(
        self, model: dict[str, Any], options: WorkerOptions, layout: Layout, progress: Progress, **local: Any
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
            if layout.world_size == 1:  # other engines of one rank may be on its machine, with cores of their own
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
            start = RankStart(setup, wire.plans_address, wire.lifeline_address, wire.server.new_keys(), store)
            message = msgspec.msgpack.encode(start, enc_hook=int)  # sizes are of a subclass of int
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
    """The driver's sockets to all ranks, in place of a `RingWriter`."""

    abandoned = 0  # running steps are not stopped

    def __init__(self, world_size: int, on_lost: Callable[[int, str], None]) -> None:
        with ExitStack() as stack:
            self.server = stack.enter_context(CurveServer(ray.util.get_node_ip_address()))
            self._plans, self.plans_address = self.server.bind(zmq.ROUTER)
            self._lifeline, self.lifeline_address = self.server.bind(zmq.ROUTER)
            self._plans.router_mandatory = self._lifeline.router_mandatory = True
            self._resources = stack.pop_all()
        self._names = [name_of(index) for index in range(world_size)]
        self._num_steps = [0] * world_size
        self._end_reasons = [""] * world_size
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="rank-pings", daemon=True)
        self._pinging.start()

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Send a message to all ranks. Raises the error of `check` if a rank has ended."""
        for name in self._names:
            try:
                self._plans.send_multipart([name, message])
            except zmq.ZMQError:  # the rank has ended, which the next ping finds, too
                while True:
                    check()
                    self.receive(LOOK_SECONDS)

    def receive(self, timeout: float) -> list[tuple[int, Up]]:
        """Return the messages of ranks, with their numbers. Wait up to `timeout` seconds for the first."""
        came: list[tuple[int, Up]] = []
        while self._plans.poll(0 if came else round(timeout * 1000)):
            name, kind, data = self._plans.recv_multipart()
            index = self._names.index(name)
            if kind == MESSAGE:
                came.append((index, decode_up(data)))
            elif kind == STEP_DONE:
                self._num_steps[index] += 1
            elif kind == END_REASON:
                self._end_reasons[index] = data.decode("utf-8", "replace")
        return came

    def steps(self, reader: int) -> int:
        return self._num_steps[reader]

    def end_reason(self, reader: int) -> str:
        return self._end_reasons[reader]

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
    """The handle of a rank's actor, in place of a `RankChild`."""

    pid = 0
    seconds_without_a_core = 0.0  # unknown: another machine's kernel counts it

    def __init__(self, index: int, actor: Any, ended: Future[None], on_end: Callable[[int, str], None]) -> None:
        self.index, self._actor, self._ended, self._on_end = index, actor, ended, on_end
        ended.add_done_callback(self._report)

    def kill(self) -> None:
        ray.kill(self._actor)

    def wait_reported(self) -> None: ...

    def join(self) -> None:
        self._ended.exception()

    def _report(self, ended: Future[None]) -> None:
        threading.Timer(END_REASON_SECONDS, self._on_end, (self.index, "has ended, as Ray reports")).start()


def join_cluster() -> None:
    """Connect to the Ray cluster of RAY_ADDRESS, or to this machine's. Raises ConfigError."""
    if not ray.is_initialized():
        try:
            # On a thread: on the main thread Ray would replace the process's handler of SIGTERM.
            address = os.environ.get("RAY_ADDRESS", "auto")
            with ThreadPoolExecutor(1) as thread:
                thread.submit(ray.init, address, log_to_driver=False, logging_level=logging.ERROR).result()
        except ConnectionError as error:
            allowed = "it needs a Ray cluster, and none runs on this machine"
            hint = "Start one with `ray start --head`, or set RAY_ADDRESS to another one's address"
            raise ConfigError("executor", "ray", allowed=allowed, hint=hint) from error


# ------------------------------------------------------------------------------------------------------------- ray rank
# One rank in a Ray actor, and its messages to its driver and to the next stage.


SILENCE_SECONDS = 10.0  # without a message: the driver or the stage before counts as lost
MEETING_SECONDS = 60.0  # limit on waiting for the stage before to start
PART_BYTES = 64 * 2**20  # longer messages are split; ZMQ takes up to `MAX_MESSAGE_BYTES` at once
MESSAGE, STEP_DONE, END_REASON = b"message", b"step", b"reason"  # the kinds of messages from a rank


class RankStart(msgspec.Struct):
    """The first message to a rank."""

    setup: RankSetup
    plans: str
    lifeline: str
    keys: Keys
    store: tuple[str, int] | None  # the address of torch's store, by which tensor ranks of several machines connect


class Meeting(msgspec.Struct):
    """The addresses of a stage's first tensor rank: for other ranks of its machine, and for each of the next stage."""

    segment: str
    store: str
    links: list[tuple[str, Keys]]


class RankActor:
    """The process of one rank, and the rank's inbox."""

    def meet(self, num_behind: int) -> bytes:
        """Return a `Meeting`, for this many ranks of the next stage. Called on a stage's first rank, before `run`."""
        own = f"/proc/{os.getpid()}/fd"
        segment, store = (f"{own}/{os.memfd_create(name)}" for name in ("headrace-ranks", "headrace-store"))
        server = CurveServer(ray.util.get_node_ip_address()).__enter__()  # until the process ends
        bound = [server.bind(zmq.PUSH) for _ in range(num_behind)]
        self._behind = [socket for socket, _ in bound]
        links = [(address, server.new_keys()) for _, address in bound]
        return msgspec.msgpack.encode(Meeting(segment, store, links))

    def run(self, message: bytes, *meetings: bytes) -> NoReturn:
        """Run the rank until its process ends. The last `Meeting` is that of its own stage, the second last that of the
        stage before."""
        end_when_stopped()
        start = msgspec.msgpack.decode(message, type=RankStart)
        self._plans = _connected(start, start.plans)
        threading.Thread(target=_end_with_driver, args=(start,), name="lifeline", daemon=True).start()
        try:
            self._serve(start, [msgspec.msgpack.decode(each, type=Meeting) for each in meetings])
        except BaseException as error:
            self._send(END_REASON, public_text(error).encode())
            traceback.print_exc()
        self._plans.close(linger=1000)
        self._plans.context.term()
        os._exit(1)  # without waiting for a library's threads and exit handlers

    def _serve(self, start: RankStart, meetings: list[Meeting]) -> None:
        layout, link = start.setup.layout, None
        if layout.pipeline_parallel_size > 1:
            before = None if layout.is_first_stage else StageReader(layout.rank, *meetings[0].links[layout.tp_rank])
            after = StageWriter(self._behind) if layout.tp_rank == 0 and not layout.is_last_stage else None
            link = StageLink(before, after, is_last=layout.is_last_stage)
        join = partial(_join, start.store, meetings[-1])
        serve(start.setup, self, link, lambda message: self._send(MESSAGE, encode(message)), join, _no_abort_checks)

    @property
    def has_message(self) -> bool:
        return bool(self._plans.poll(0))

    def read(self) -> bytes:
        return self._plans.recv()

    def count_step(self) -> None:
        self._send(STEP_DONE)

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        self._plans.send_multipart([kind, data])


def _no_abort_checks(worker: Worker) -> AbortChecks:
    return lambda step: None


class StageReader:
    """The socket from the stage before. Its messages wait here until this stage reads them."""

    def __init__(self, rank: int, address: str, keys: Keys) -> None:
        """Connect to the stage before. Raises RankLost if it cannot be reached."""
        self._rank = rank
        self._socket: Socket = zmq.Context.instance().socket(zmq.PULL)
        self._ends: Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self._socket, address, keys)
        if not self._socket.poll(round(1000 * MEETING_SECONDS)):
            raise self._lost("cannot reach the stage before it")
        self._socket.recv()

    def read(self) -> bytes:
        """Wait for the next message, and return it. Raises RankLost if the connection is lost."""
        while not self._socket.poll(1000):
            if self._ends.poll(0):
                time.sleep(SILENCE_SECONDS)  # if a rank has ended, the driver finds and reports it first
                raise self._lost("has lost its connection to the stage before it")
        return b"".join(self._socket.recv_multipart())

    def _lost(self, why: str) -> RankLost:
        return RankLost(self._rank, os.uname().nodename, why)


class StageWriter:
    """The sockets to all ranks of the next stage."""

    def __init__(self, sockets: list[Socket]) -> None:
        """Wait until the readers are connected, because later imports could delay the thread that admits them."""
        self._sockets = sockets
        for socket in sockets:
            socket.send(b"")

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Send a message. There is always room."""
        parts = [message[start : start + PART_BYTES] for start in range(0, len(message), PART_BYTES)]
        for socket in self._sockets:
            socket.send_multipart(parts)


def _join(
    store: tuple[str, int] | None, meeting: Meeting, setup: RankSetup, options: WorkerOptions, files: ModelFiles
) -> Any:
    if store is None:  # all ranks of the stage are on this machine
        setup.segment, setup.store = (os.open(path, os.O_RDWR) for path in (meeting.segment, meeting.store))
        return join_on_this_machine(setup, options, files)
    if library_for(files.config, options, resolve_device(options.device)) is not None:
        allowed = "tensor ranks of the C++ library share a machine's memory, and these are on several machines"
        hint = "dtype=float32 works, or machines with room for as many ranks"
        raise ConfigError("tensor_parallel_size", setup.layout.tensor_parallel_size, allowed=allowed, hint=hint)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from gpu.models.communicators import TorchCommunicator

    return TorchCommunicator(TCPStore(*store), setup.layout, resolve_device(options.device))


def _connected(start: RankStart, address: str) -> Socket:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.routing_id = name_of(start.setup.layout.rank)
    connect(socket, address, start.keys)
    return socket


def _end_with_driver(start: RankStart) -> NoReturn:
    lifeline = _connected(start, start.lifeline)
    lifeline.send(b"")
    while lifeline.poll(round(1000 * SILENCE_SECONDS)):
        lifeline.recv()
    os._exit(1)


def name_of(rank: int) -> bytes:
    return b"rank-%d" % rank


# -------------------------------------------------------------------------------------------------------------- sockets
# Between machines they are authenticated and encrypted by CURVE, with keys that are made for one client. ZMQ drops the
# messages of strangers before Headrace reads them.


class Keys(msgspec.Struct, frozen=True):
    """The keys with which one client proves its identity. They are secret and must not be logged."""

    server_public: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


class CurveServer:
    """A context manager. Its sockets accept only clients that have its keys, and leaving it drops unsent messages."""

    def __init__(self, host: str) -> None:
        """`host` is the address at which clients reach this machine."""
        self._host = f"[{host}]" if ":" in host else host
        self._known: set[bytes] = set()

    def __enter__(self) -> Self:
        self._public, self._secret = zmq.curve_keypair()
        with ExitStack() as stack:
            self._context = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            authenticator = ThreadAuthenticator(self._context)
            authenticator.start()
            stack.callback(authenticator.stop)
            authenticator.configure_curve_callback(credentials_provider=self)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def bind(self, kind: int) -> tuple[Socket, str]:
        """Bind a socket without a high-water mark. Returns it and its address."""
        socket = _limited(self._context.socket(kind))
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.ipv6 = self._host.startswith("[")
        socket.bind(f"tcp://{self._host}:*")
        address = socket.last_endpoint
        assert isinstance(address, bytes)
        return socket, address.decode()

    def new_keys(self) -> Keys:
        """Make the keys of one client."""
        public, secret = zmq.curve_keypair()
        self._known.add(public)
        return Keys(self._public, public, secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the key is a client's. ZMQ's authenticator calls this."""
        return key in self._known


def connect(socket: Socket, address: str, keys: Keys) -> None:
    """Connect a client's socket without reconnects: messages that are sent between two connections would be lost."""
    _limited(socket)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.ipv6 = "[" in address
    socket.reconnect_ivl = -1
    socket.connect(address)


def _limited(socket: Socket) -> Socket:
    socket.set_hwm(0)
    socket.heartbeat_ivl = round(1000 * PROBE_SECONDS)
    socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS)
    socket.handshake_ivl = round(1000 * HANDSHAKE_SECONDS)
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket
