"""Errors that the engine raises to its callers, and their form between processes."""

from __future__ import annotations

import traceback

import msgspec


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class InvalidRequest(HeadraceError):
    """A request that can never run: the client must change it.

    `param` is the field's name in the client's request (``"temperature"``, ``"messages.0.content"``); the message
    names the value and what is allowed. `code` is an optional machine-readable word such as
    ``"context_length_exceeded"``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(InvalidRequest):
    """A prompt of `num_tokens` tokens, or more, for a context of `max_model_len`."""

    def __init__(
        self, num_tokens: int, max_model_len: int, *, param: str, is_exact: bool = True, needs_answer: bool = True
    ) -> None:
        length = f"{num_tokens} tokens" if is_exact else f"at least {num_tokens} tokens"
        rest = " and at least one must be left for the answer" if needs_answer else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {length}{rest}. "
            "Please shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class EngineNotReady(HeadraceError):
    """The engine cannot generate yet: the model is still being loaded."""


class EngineDead(HeadraceError):
    """The engine has ended and will not generate again."""


class EngineLost(EngineDead):
    """The process or the machine of an engine has ended."""


class RankLost(EngineLost):
    """One of the processes that compute a model together has ended; the others cannot compute without it."""

    def __init__(self, rank: int, host: str, why: str) -> None:
        super().__init__(f"rank {rank} on {host} {why}")
        self.rank = rank
        self.host = host


class StepAbandoned(HeadraceError):
    """A step was interrupted because all its requests have been aborted."""


class RequestFailed(HeadraceError):
    """One request failed in the engine (`FinishReason.ERROR`); other requests go on."""


class ProfileTooLarge(HeadraceError):
    """The profile of an executor's steps exceeds the size of an answer."""


class ConfigError(HeadraceError):
    """A setting that cannot work with this model or on this machine; the operator must change it.

    The message names the setting, its value, what is allowed and a value that works.
    """

    def __init__(self, setting: str, value: object, *, allowed: str, hint: str) -> None:
        super().__init__(f"{setting} is {value}: {allowed}. {hint}")
        self.setting = setting
        self.value = value


# ------------------------------------------------------------------------------------------------------ errors in words
# Errors as messages between processes.


class ErrorInWords(msgspec.Struct, array_like=True):
    """An error as a message: its class, its text and its traceback."""

    kind: str
    message: str
    traceback: str  # empty if the message says everything

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
        """Return the error, of the same class if it is a HeadraceError that is known here, else EngineDead."""
        kind = _known_errors().get(self.kind, EngineDead)
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)  # not __init__, which would make a message of its arguments
        if self.traceback:
            error.__cause__ = RemoteError(self.traceback)
        return error


class RemoteError(Exception):
    """Stands for an exception in another process; its text is the traceback."""

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
    """Escape the lone surrogates that file names may hold."""
    return text.encode("utf-8", "backslashreplace").decode()
