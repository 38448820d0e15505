"""The record of a request: its phases, figures and transcript; and a limit on lines of a log."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import orjson

from engine.messages import SPECIAL_MARK, RequestOutput

INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"


class Phase(StrEnum):
    """The phases of a request. Those of a choice in the engine, from `QUEUE` to `DECODE`, are in ascending order."""

    RECEIVE = "receive"  # its body
    PARSE = "parse"
    TOKENIZE = "tokenize"  # chat template and tokens
    CHECK = "check"  # against the model
    COMPILE_GRAMMAR = "compile_grammar"
    ENDED = "ended"
    QUEUE = "queue"
    PREEMPTED = "preempted"  # waits again
    WAIT_FOR_GRAMMAR = "wait_for_grammar"
    LOAD_KV = "load_kv"  # from a tier
    PREFILL = "prefill"
    DECODE = "decode"
    DELIVER = "deliver"  # until the client has everything


OUTPUT_FIGURES: Final = (
    *("first_scheduled_time", "first_token_time", "finish_reason"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
)
"""The fields of an `AccessRecord` that come from the engine's stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    """The description and outcome of a request, for the log and for traces.

    Times are `time.monotonic()`; None for a phase that was not reached, or of a request that generates nothing. `route`
    is the path's template. `error` is a type or code, not a message, which could quote the prompt. `param` is the path
    of the field at fault, up to the first name that a client may have made up.
    """

    request_id: str
    method: str
    path: str
    route: str
    model: str
    status: int  # 499 if the client left before the first byte
    arrival_time: float
    ended_time: float
    error: str | None = None
    param: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


# ----------------------------------------------------------------------------------------------------------- transcript
# The messages of a request for its trace, if the setting `trace_messages` is on, within limits.


T = TypeVar("T")
MAX_MESSAGES: Final = 32  # the last messages of a conversation, and the first choices
MAX_CHARACTERS: Final = 4096  # of one message


class Transcript:
    """The messages of a request, each as role and text, and of its answer."""

    def __init__(self, messages: Iterable[tuple[str, str]]) -> None:
        self._asked = [(role, text[:MAX_CHARACTERS]) for role, text in list(messages)[-MAX_MESSAGES:]]
        self._answers: dict[int, str] = defaultdict(str)

    def before(self, write: Callable[[RequestOutput], T]) -> Callable[[RequestOutput], T]:
        """Return a function that records an output and then calls `write`."""

        def note_and_write(output: RequestOutput) -> T:
            if output.index < MAX_MESSAGES and (room := MAX_CHARACTERS - len(self._answers[output.index])) > 0:
                self._answers[output.index] += output.text.replace(SPECIAL_MARK, "")[:room]
            return write(output)

        return note_and_write

    def attributes(self) -> dict[str, str]:
        """Return the attributes of OpenTelemetry's conventions, as JSON."""
        answers = (("assistant", text) for _, text in sorted(self._answers.items()))
        return {INPUT_MESSAGES: _as_json(self._asked), OUTPUT_MESSAGES: _as_json(answers)}


def _as_json(messages: Iterable[tuple[str, str]]) -> str:
    parts: list[dict[str, Any]] = [
        {"role": role, "parts": [{"type": "text", "content": text}]} for role, text in messages
    ]
    return orjson.dumps(parts).decode()


class Seldom:
    """Lets at most `most` log lines of one kind through in `seconds`, and counts the others."""

    def __init__(self, most: int = 1, seconds: float = 10.0) -> None:
        self._most, self._seconds = most, seconds
        self._since, self._num = -math.inf, 0

    def left_out(self) -> int | None:
        """Return None if the line is to be left out, else the number of lines that were left out before it."""
        before = 0
        if time.monotonic() - self._since >= self._seconds:
            before = max(0, self._num - self._most)
            self._since, self._num = time.monotonic(), 0
        self._num += 1
        return before if self._num <= self._most else None
