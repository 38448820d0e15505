"""How commands and events cross between a front end and an engine's process: as msgpack; nothing is ever pickled.

    down   the setup, which is plain data, then commands   ROUTER → DEALER
    up     events                                          PUSH → PULL

On one machine over Unix sockets in a private directory; between machines over TCP with CURVE: encrypted, and each side
shows the other a key that was made for this one engine.

Who imports it: `engine.transport.link` and those on it above, `engine.transport.process_core` and `remote_core` below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import zmq

from engine.errors import HeadraceError
from engine.errors_in_words import ErrorInWords

# Files of the private directory that both sides know.
DOWN, UP, HEARTBEAT = "down", "up", "heartbeat"

# Of what comes from another machine: the logits of a long step's prompt, all of them, are about half of it.
MAX_MESSAGE_BYTES = 256 * 2**20
# ZMQ's own threads ask each other whether they are there, however busy Python is. So long may a machine be silent.
PROBE_SECONDS, SILENCE_SECONDS = 1.0, 5.0
HANDSHAKE_SECONDS = 5.0  # until who connects has shown his key


class Keys(msgspec.Struct, frozen=True):
    """What an engine on another machine proves itself with, once. Secret: it must not come to a log."""

    server_public: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


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


def limited(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket between machines with its limits: of silence, of a message's size, of a stranger's time."""
    socket.heartbeat_ivl = round(1000 * PROBE_SECONDS)
    socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS)
    socket.handshake_ivl = round(1000 * HANDSHAKE_SECONDS)
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket


class Report(Protocol):
    """Is told how far loading is; a `gpu.checkpoint.Progress`."""

    def __call__(self, phase: str, done: int, total: int | None) -> None: ...


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
