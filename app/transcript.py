"""The messages of a request, for its trace, where `trace_messages` asks for them. Never more than some of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import orjson

from app.trace_names import INPUT_MESSAGES, OUTPUT_MESSAGES
from engine.messages import SPECIAL_MARK, RequestOutput

T = TypeVar("T")
MAX_MESSAGES: Final = 32  # the last of a conversation, and the first choices
MAX_CHARACTERS: Final = 4096  # of one message


class Transcript:
    """Takes the messages that a request brought, each as role and text, and listens to what it is answered."""

    def __init__(self, messages: Iterable[tuple[str, str]]) -> None:
        self._asked = [(role, text[:MAX_CHARACTERS]) for role, text in list(messages)[-MAX_MESSAGES:]]
        self._answers: dict[int, str] = defaultdict(str)

    def before(self, write: Callable[[RequestOutput], T]) -> Callable[[RequestOutput], T]:
        """The writer's function, listened to."""

        def note_and_write(output: RequestOutput) -> T:
            if output.index < MAX_MESSAGES and (room := MAX_CHARACTERS - len(self._answers[output.index])) > 0:
                self._answers[output.index] += output.text.replace(SPECIAL_MARK, "")[:room]
            return write(output)

        return note_and_write

    def attributes(self) -> dict[str, str]:
        """JSON as the conventions have it."""
        answers = (("assistant", text) for _, text in sorted(self._answers.items()))
        return {INPUT_MESSAGES: _as_json(self._asked), OUTPUT_MESSAGES: _as_json(answers)}


def _as_json(messages: Iterable[tuple[str, str]]) -> str:
    told: list[dict[str, Any]] = [
        {"role": role, "parts": [{"type": "text", "content": text}]} for role, text in messages
    ]
    return orjson.dumps(told).decode()
