"""What the front end tells whoever keeps the figures. The application's metrics are one observer; tests have others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.messages import FinishReason
from engine.stats import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that is gone. Tokens are those of its usage; what it never reached has None for seconds."""

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    longest_output: int  # tokens of the choice that got most
    cached_tokens: int
    e2e_seconds: float  # arrival to end
    queue_seconds: float | None  # arrival to first schedule
    prefill_seconds: float | None  # first schedule to first token
    decode_seconds: float | None  # first token to end


class Observer(Protocol):
    """Called on the front end's thread. Implementations are quick and never raise. Times are in seconds."""

    def on_step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        """After each step: the scheduler's stats and how many tokens the step gave to requests that are still open."""
        ...

    def on_prompt(self, tokens: int) -> None:
        """The prompts of a request, once: with its first token, or with its end if it never got one."""
        ...

    def on_first_token(self, seconds: float) -> None:
        """A choice got its first token, this long after the request's arrival."""
        ...

    def on_inter_token(self, seconds: float, count: int) -> None:
        """`count` further tokens came with this step, each `seconds` after the one before it in its choice."""
        ...

    def on_request_finished(self, finished: FinishedRequest) -> None:
        """A request is gone; once per request."""
        ...

    def on_delivery(self, seconds: float) -> None:
        """What the engine had sent was handed over, which took this much of the thread's processor time."""
        ...


class NullObserver:
    """Keeps no figures."""

    def on_step(self, stats: SchedulerStats, generated_tokens: int) -> None: ...

    def on_prompt(self, tokens: int) -> None: ...

    def on_first_token(self, seconds: float) -> None: ...

    def on_inter_token(self, seconds: float, count: int) -> None: ...

    def on_request_finished(self, finished: FinishedRequest) -> None: ...

    def on_delivery(self, seconds: float) -> None: ...
