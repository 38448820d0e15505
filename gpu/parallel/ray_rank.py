"""One rank in an actor of Ray's, and how it talks with its driver (`gpu.parallel.ray_executor`) and its neighbours.

What goes between machines goes over ZMQ, to each with keys that were made for it; what tensor ranks say within a layer
over the memory of their machine, if they have one in common, else over torch.distributed.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec
import ray
import zmq

from engine.curve import CurveServer, Keys, Socket, connect
from engine.end_when_stopped import end_when_stopped
from engine.errors import ConfigError, HeadraceError, RankLost
from engine.errors_in_words import ErrorInWords
from gpu.checkpoint import ModelFiles
from gpu.model_loader import WorkerOptions, library_for, resolve_device
from gpu.parallel.messages import Failed, RankSetup, Up, encode
from gpu.parallel.rank import Rank
from gpu.parallel.rank_process import in_few_words, join_on_this_machine, load
from gpu.parallel.stage_link import StageLink

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

    from gpu.parallel.torch_communicator import TorchCommunicator

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
