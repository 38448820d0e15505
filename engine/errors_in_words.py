"""Errors on their way from one process to another; `engine.transport.wire` and `gpu.parallel` import it."""

from __future__ import annotations

import traceback

import msgspec

from engine.errors import EngineDead, HeadraceError


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
    """Stands for what was raised in another process: its text is the traceback there."""

    def __str__(self) -> str:
        return f"in another process\n\n{self.args[0].rstrip()}"


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
