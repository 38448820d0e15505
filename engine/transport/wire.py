"""How commands and events cross between a front end and an engine's process: as msgpack; nothing is ever pickled.

    down   the setup, which is plain data, then commands   ROUTER → DEALER
    up     events                                          PUSH → PULL

Who imports it: `engine.transport.process_client` and `engine.transport.child` above, `engine.transport.process_core`
below.
"""

from __future__ import annotations

import traceback
from typing import Any, Protocol

import msgspec

from engine.errors import EngineDead, HeadraceError

# Files of the private directory that both sides know.
DOWN, UP, HEARTBEAT = "down", "up", "heartbeat"


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


class ErrorInWords(msgspec.Struct, array_like=True):
    """An error on its way: its class and words, with the traceback as text."""

    kind: str
    message: str
    traceback: str  # of what has to be looked into; empty where the message tells everything

    @classmethod
    def of(cls, error: BaseException) -> ErrorInWords:
        foreseen = isinstance(error, HeadraceError)
        telling = error.__cause__ if foreseen else error
        return cls(
            kind=type(error).__name__ if foreseen else EngineDead.__name__,
            message=_encodable(str(error) if foreseen else f"{type(error).__name__}: {error}"),
            traceback=_encodable("".join(traceback.format_exception(telling)) if telling is not None else ""),
        )

    def error(self) -> HeadraceError:
        """The same error on this side: of the same class if it is one of ours and known here, else EngineDead."""
        kind = _known_errors().get(self.kind, EngineDead)
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)  # classes with further arguments have made their message of them
        if self.traceback:
            error.__cause__ = RemoteError(self.traceback)
        return error


class RemoteError(Exception):
    """Stands for what was raised in the engine's process: its text is the traceback there."""

    def __str__(self) -> str:
        return f"in the engine's process\n\n{self.args[0].rstrip()}"


def _known_errors() -> dict[str, type[HeadraceError]]:
    found: dict[str, type[HeadraceError]] = {}
    unseen: list[type[HeadraceError]] = [HeadraceError]
    while unseen:
        kind = unseen.pop()
        found[kind.__name__] = kind
        unseen += kind.__subclasses__()
    return found


def _encodable(text: str) -> str:
    """File names may hold what is no text."""
    return text.encode("utf-8", "backslashreplace").decode()
