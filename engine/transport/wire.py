"""Messages between processes as msgpack, and the addresses of the sockets that carry them.

    down   the setup, which is plain data, then commands   ROUTER → DEALER
    up     events                                          PUSH → PULL

Each message begins with its number. If one is lost or arrives twice, the engine counts as dead, because its requests
could otherwise miss outputs unnoticed. The sockets are Unix sockets in a private directory.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine.errors import ErrorInWords, HeadraceError

HEARTBEAT = "heartbeat"  # name of a file in the private directory

_NUMBER = struct.Struct("<Q")


def addresses(directory: Path) -> tuple[str, str]:
    """Return the ZMQ addresses of the sockets `down` and `up` in the private directory."""
    return f"ipc://{directory / 'down'}", f"ipc://{directory / 'up'}"


class Report(Protocol):
    """Reports the progress of loading; a `gpu.checkpoint.Progress`."""

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
    """Return an encoder of commands and events into msgpack."""
    return msgspec.msgpack.Encoder(enc_hook=_in_words)


def decoder(of: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for values of this type, as `encoder` encodes them."""
    return msgspec.msgpack.Decoder(of, dec_hook=_from_words)


def _in_words(value: object) -> ErrorInWords:
    if isinstance(value, BaseException):
        return ErrorInWords.of(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be encoded for another process")


def _from_words(of: type, words: Any) -> HeadraceError:
    assert of is BaseException
    return msgspec.convert(words, ErrorInWords).error()
