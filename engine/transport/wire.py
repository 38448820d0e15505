"""Messages between processes as msgpack, and the sockets that carry them.

    down   the setup, which is plain data, then commands   ROUTER → DEALER
    up     events                                          PUSH → PULL

Each message begins with its number, which shows a lost or doubled message. The engine then counts as dead, because its
requests may lack outputs without a sign of it.

On one machine over Unix sockets in a private directory; between machines over TCP with CURVE: encrypted, and each side
shows the other a key that was made for this one engine.

The front end's clients import it, and so do `engine.transport.process_core` and `remote_core` on the engine's side.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import anyio
import msgspec
import zmq

from engine.commands import Command, Event
from engine.core.heartbeat import Heartbeat
from engine.curve import Keys
from engine.errors import EngineDead, ErrorInWords, HeadraceError

# Files of the private directory that both sides know.
DOWN, UP, HEARTBEAT = "down", "up", "heartbeat"

_NUMBER = struct.Struct("<Q")


class Ends(msgspec.Struct, frozen=True):
    """Where an engine finds its front end: ZMQ's addresses."""

    down: str
    up: str
    keys: Keys | None = None  # None: nobody else can reach these addresses

    @classmethod
    def within(cls, directory: Path) -> Self:
        return cls(f"ipc://{directory / DOWN}", f"ipc://{directory / UP}")


class Ping(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Down to an engine on another machine: the front end's clock, and a question."""

    now: float


class Pulse(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Up, the answer: the engine's heartbeat."""

    seconds_since_progress: float
    is_asleep: bool
    kv_sequence: int


class Report(Protocol):
    """Is told how far loading is; a `gpu.checkpoint.Progress`."""

    def __call__(self, phase: str, done: int, total: int | None) -> None: ...


class Numberer:
    """Encode the messages of one direction, with their numbers."""

    def __init__(self) -> None:
        self._encoder = encoder()
        self._buffer = bytearray(_NUMBER.size)  # reused for each message
        self._number = 0

    def encode(self, message: Any) -> bytearray:
        """Return the encoded message, in a buffer that the next call overwrites."""
        self._encoder.encode_into(message, self._buffer, _NUMBER.size)
        _NUMBER.pack_into(self._buffer, 0, self._number)
        self._number += 1
        return self._buffer


class NumberChecker:
    """Check that the messages of a `Numberer` arrive in order, each once."""

    def __init__(self) -> None:
        self._number = 0

    def content_of(self, message: bytes) -> memoryview:
        """Return the message without its number, for a `decoder`. Raises msgspec.DecodeError if it is not the next."""
        if len(message) < _NUMBER.size:
            raise msgspec.DecodeError(f"a message of {len(message)} bytes has no number")
        (number,) = _NUMBER.unpack_from(message)
        if number != self._number:
            raise msgspec.DecodeError(f"message {number} came, but message {self._number} was next")
        self._number += 1
        return memoryview(message)[_NUMBER.size :]


def encoder() -> msgspec.msgpack.Encoder:
    """Of commands and events, into msgpack."""
    return msgspec.msgpack.Encoder(enc_hook=_in_words)


def decoder(of: Any) -> msgspec.msgpack.Decoder[Any]:
    """Of what `encoder` made of a type."""
    return msgspec.msgpack.Decoder(of, dec_hook=_from_words)


def _in_words(value: object) -> ErrorInWords:
    if isinstance(value, BaseException):
        return ErrorInWords.of(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot cross")


def _from_words(of: type, words: Any) -> HeadraceError:
    assert of is BaseException
    return msgspec.convert(words, ErrorInWords).error()


# ----------------------------------------------------------------------------------------------------------------- link
# The front end's two sockets to one engine, to which the engine connects.
#
# `engine.transport.child` and `engine.transport.remote` say where they are and who is at the other end.


class Ended(NamedTuple):
    """How an engine's process has ended."""

    error: EngineDead
    last_event_seconds: float  # that what it has said last may still be on its way


class Link(ABC):
    """A hold on an engine elsewhere, which leaving its block kills. Those that inherit from it make the sockets, start
    the engine and see its end."""

    heartbeat: Heartbeat
    _down: zmq.Socket[bytes]  # ROUTER
    _up: zmq.Socket[bytes]  # PULL
    _resources: ExitStack

    def __init__(self) -> None:
        self._encode = Numberer().encode
        self._decode = decoder(Event | Pulse).decode
        self._numbers = NumberChecker()
        self._peer: bytes | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if it is one of this machine."""
        return None

    async def connect(self, setup: Any) -> None:
        """Wait for the engine's first sign, and send it its setup: plain data, before all commands. What is sent
        earlier would be dropped: ROUTER does not know its peer yet."""
        while self._peer is None:
            try:
                self._peer, *_ = self._down.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await anyio.wait_readable(_descriptor(self._down))
        self.send(setup)

    def send(self, command: Command | Any) -> None:
        """Never waits: the high-water mark is off. What is sent to an engine that has gone is dropped."""
        if self._peer is not None:
            self._down.send_multipart([self._peer, self._encode(command)], zmq.NOBLOCK)

    async def receive(self) -> list[Event]:
        """Everything that has arrived, in order. Waits until there is something. Raises msgspec.DecodeError for what is
        no event."""
        while True:
            events: list[Event] = []
            # The descriptor of a ZMQ socket tells that something has changed, and tells it once: it may be waited for
            # only after receiving has failed, which has looked at everything that was told so far.
            with suppress(zmq.Again):
                while True:
                    event = self._decode(self._numbers.content_of(self._up.recv(zmq.NOBLOCK)))
                    if isinstance(event, Pulse):
                        self.take(event)
                    else:
                        events.append(event)
            if events:
                return events
            await anyio.wait_readable(_descriptor(self._up))

    def take(self, pulse: Pulse) -> None:  # noqa: B027 - nothing to do where memory is shared
        """The heartbeat of an engine that cannot share memory."""

    @abstractmethod
    async def wait_gone(self) -> Ended:
        """Wait until the engine has ended, or can be reached no more."""

    @abstractmethod
    def kill(self) -> None:
        """At once, whatever it does. Nothing happens if it has ended."""


def _descriptor(of: zmq.Socket[bytes]) -> int:
    descriptor = of.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
