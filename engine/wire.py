"""What crosses between a front end and an engine's process, as msgpack; nothing is ever pickled.

    down   Setup, then Add, Finish, Reset and End   ROUTER → DEALER
    up     Progress, then Ready, Step ..., Died     PUSH → PULL

Who imports it: `engine.process_client` and `engine.child` above, `engine.process_core` below.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.errors import EngineDead, HeadraceError
from engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, FinishRequests, ResetPrefixCache

# Files of the private directory that both sides know.
DOWN, UP, HEARTBEAT = "down", "up", "heartbeat"


class Setup(msgspec.Struct, tag="setup", array_like=True):
    """What the engine is made from: plain data that the one who starts it and the one who builds it agree on."""

    content: Any


class Add(msgspec.Struct, tag="add", array_like=True, gc=False):
    """The choices of one prompt, which crosses once and not with each of them."""

    prompt_token_ids: list[int]
    choices: list[EngineCoreRequest]  # each without the prompt

    @classmethod
    def of(cls, requests: Sequence[EngineCoreRequest]) -> Add:
        prompt = requests[0].prompt_token_ids
        assert all(request.prompt_token_ids is prompt for request in requests)
        return cls(prompt, [msgspec.structs.replace(request, prompt_token_ids=[]) for request in requests])

    def requests(self) -> list[EngineCoreRequest]:
        """They share the prompt's list here as they did there."""
        for request in self.choices:
            request.prompt_token_ids = self.prompt_token_ids
        return self.choices


class Finish(msgspec.Struct, tag="finish", array_like=True, gc=False):
    finish: FinishRequests


class Reset(msgspec.Struct, tag="reset", array_like=True, gc=False):
    reset: ResetPrefixCache


class End(msgspec.Struct, tag="end", array_like=True, gc=False):
    """Last message down."""


Down = Setup | Add | Finish | Reset | End


class Report(Protocol):
    """Is told how far loading is; a `gpu.weights.Progress`."""

    def __call__(self, phase: str, done: int, total: int | None) -> None: ...


class Progress(msgspec.Struct, tag="progress", array_like=True, gc=False):
    """What a Report is told."""

    phase: str
    done: int
    total: int | None


class Ready(msgspec.Struct, tag="ready", array_like=True, gc=False):
    measures: EngineReady


class Step(msgspec.Struct, tag="step", array_like=True, gc=False):
    outputs: EngineCoreOutputs


class Died(msgspec.Struct, tag="died", array_like=True):
    """Last message up: what the engine ended of, orderly ends included."""

    kind: str
    message: str
    traceback: str  # of what has to be looked into; empty where the message tells everything

    @classmethod
    def of(cls, error: BaseException) -> Died:
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


Up = Progress | Ready | Step | Died


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
