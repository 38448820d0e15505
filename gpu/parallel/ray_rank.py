"""One rank in an actor of Ray's, and how its driver (`gpu.parallel.ray_executor`) talks with it."""

from __future__ import annotations

import os
import threading
import traceback
from functools import partial
from typing import Any, NoReturn

import msgspec
import zmq

from engine.curve import Keys, connect
from engine.end_when_stopped import end_when_stopped
from engine.errors import ConfigError, HeadraceError
from engine.errors_in_words import ErrorInWords
from gpu.checkpoint import ModelFiles
from gpu.model_loader import WorkerOptions, library_for, resolve_device
from gpu.parallel.messages import Failed, RankSetup, Up, encode
from gpu.parallel.rank import Rank
from gpu.parallel.rank_process import in_few_words, load

SILENCE_SECONDS = 10.0  # after which a rank has lost its driver
SAYS, HAS_MADE_A_STEP, LAST_WORDS = b"says", b"step", b"words"  # what a message from a rank is


class Told(msgspec.Struct):
    """What a rank is started with."""

    setup: RankSetup
    plans: str
    lifeline: str
    keys: Keys
    store: tuple[str, int] | None  # torch's, in which the tensor ranks find each other


class RankActor:
    """A process that is nothing but one rank, and its inbox."""

    def run(self, message: bytes) -> NoReturn:
        end_when_stopped()
        told = msgspec.msgpack.decode(message, type=Told)
        self._plans = _connected(told, told.plans)
        threading.Thread(target=_end_with_driver, args=(told,), name="lifeline", daemon=True).start()
        try:
            self._serve(told)
        except BaseException as error:
            self._send(LAST_WORDS, in_few_words(error).encode())
            traceback.print_exc()
        self._plans.close(linger=1000)
        self._plans.context.term()
        os._exit(1)  # neither a library's thread nor its exit handler may hold up the end

    def _serve(self, told: Told) -> None:
        rank = Rank(told.setup.layout, self, self._tell, self.count_step, None)
        try:
            worker, cost, vocab_size = load(told.setup, rank, self._tell, partial(_communicator, told.store))
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


def _communicator(place: tuple[str, int] | None, setup: RankSetup, options: WorkerOptions, files: ModelFiles) -> Any:
    if place is None:
        return None
    if library_for(files.config, options, resolve_device(options.device)) is not None:
        allowed = "tensor ranks of the CPU library share a machine's memory, and those on Ray may have none in common"
        raise ConfigError("dtype", options.dtype, allowed=allowed, hint="dtype=float32 works, or executor=mp")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from gpu.parallel.torch_communicator import TorchCommunicator

    return TorchCommunicator(TCPStore(*place), setup.layout, resolve_device(options.device))


def _connected(told: Told, address: str) -> zmq.Socket[bytes]:
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
