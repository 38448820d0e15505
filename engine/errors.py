"""Errors that the engine raises to its callers. Each carries what a client needs to correct the request."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class InvalidRequest(HeadraceError):
    """A request that can never run: the client must change it.

    `param` names the field in the client's own words (``"temperature"``, ``"messages.0.content"``); the message
    says what was given and what is allowed. `code` is an optional machine-readable word such as
    ``"context_length_exceeded"``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(InvalidRequest):
    """A prompt of `num_tokens` tokens, or at least so many, for a context of `max_model_len`."""

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
    """The model is still being loaded; nothing can be generated yet."""


class EngineDead(HeadraceError):
    """The engine has ended; nothing will be generated any more."""


class EngineLost(EngineDead):
    """The process of an engine has gone, or its machine."""


class RankLost(EngineLost):
    """One of the processes that compute a model together has gone, and the others are of no use without it."""

    def __init__(self, rank: int, host: str, why: str) -> None:
        super().__init__(f"rank {rank} on {host} {why}")
        self.rank = rank
        self.host = host


class StepAbandoned(HeadraceError):
    """A step was broken off because every request in it has been aborted."""


class RequestFailed(HeadraceError):
    """One request failed inside the engine (`FinishReason.ERROR`); others are unharmed."""


class ProfileTooLarge(HeadraceError):
    """What was recorded of an executor's steps is more than an answer may hold."""


class ConfigError(HeadraceError):
    """A setting that cannot work with this model or on this machine; the operator must change it.

    The message says what was given, what is allowed and a value that works.
    """

    def __init__(self, setting: str, value: object, *, allowed: str, hint: str) -> None:
        super().__init__(f"{setting} is {value}: {allowed}. {hint}")
        self.setting = setting
        self.value = value
