"""What no grammar could enforce of a JSON Schema, checked when the answer is there, and what the client is told of it.

The app feeds an `AnswerCheck` with what it feeds the writer; when a choice ends, its JSON is checked, in a process of
`CheckProcesses`. Writers put what `told` says next to the choice. There is an `AnswerCheck` only for answers of which
something was not enforced.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jsonschema_rs

from engine.child import ChildPool, ChildProcess
from engine.child_main import to_bytes
from engine.messages import FinishReason, RequestOutput, Unenforced
from protocol.syntax.message_parts import (
    ContentDelta,
    MessageFormat,
    MessageParser,
    TokenBytes,
    ToolCallArguments,
    ToolCallStart,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

SECONDS = 1.0  # for all checks of one answer
ERROR_SECONDS = 0.25  # to say why a value does not fit, which may take much longer than to say that
MAX_CHARACTERS = 512 * 1024  # of JSON that is checked

Outcome = Literal["valid", "invalid", "unknown"]
OUTCOMES: tuple[Outcome, ...] = ("valid", "invalid", "unknown")


class Checked(NamedTuple):
    """Whether a value fits, None if that was not found out, and why it does not."""

    valid: bool | None
    errors: list[str]


Check = Callable[[str, str, float], Checked]
"""Checks a text against a schema (both JSON) within so many seconds. Blocks."""


class AnswerCheck:
    """Checks the choices of one answer. Not thread-safe; `feed` blocks when it gets the end of a choice.

    `unenforced` is the engine's; `functions` are the names of the tags' functions, None if content is what is checked.
    """

    def __init__(
        self,
        unenforced: Sequence[Unenforced],
        functions: Sequence[str] | None,
        message_format: MessageFormat,
        token_bytes: TokenBytes,
        check: Check,
    ) -> None:
        self.outcomes = Counter[Outcome]()
        self._content = unenforced[0] if functions is None else None
        self._of_function = {functions[each.number]: each for each in unenforced} if functions is not None else {}
        self._new_parser = partial(message_format.parser, token_bytes)
        self._check = check
        self._left = SECONDS
        self._choices: dict[int, _Choice] = {}
        self._told: dict[int, dict[str, Any]] = {}

    def feed(self, output: RequestOutput) -> None:
        """Take in what the writer gets next."""
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._choices[output.index] = _Choice(self._new_parser())
        choice.read(output)
        if output.finish_reason is not None:
            self._told[output.index] = self._judged(choice, output.finish_reason is FinishReason.STOP)

    def before(self, write: Callable[[RequestOutput], T]) -> Callable[[RequestOutput], T]:
        """The writer's function, which finds what is told of an output when it gets it."""

        def feed_and_write(output: RequestOutput) -> T:
            self.feed(output)
            return write(output)

        return feed_and_write

    def told(self, index: int = 0) -> dict[str, Any]:
        """What a choice that has ended, or a whole answer, has to say: one key and its object."""
        return {"structured_output": self._told[index]} if index in self._told else {}

    def _judged(self, choice: _Choice, is_whole: bool) -> dict[str, Any]:
        if self._content is not None:
            return self._judgement(self._content, "".join(choice.content), is_whole)
        calls = []
        for number, (name, arguments) in enumerate(choice.calls):
            if name in self._of_function:
                is_last = number == len(choice.calls) - 1
                judged = self._judgement(self._of_function[name], "".join(arguments), is_whole or not is_last)
                calls.append({"index": number, "name": name, **judged})
        valid = [call["valid"] for call in calls]
        return {"valid": False if False in valid else None if None in valid else True, "tool_calls": calls}

    def _judgement(self, what: Unenforced, text: str, is_whole: bool) -> dict[str, Any]:
        checked = Checked(None, [])
        if is_whole and len(text) <= MAX_CHARACTERS and self._left > 0:
            began = time.monotonic()
            checked = self._check(what.schema, text, self._left)
            self._left -= time.monotonic() - began
        outcome: Outcome = "unknown" if checked.valid is None else "valid" if checked.valid else "invalid"
        self.outcomes[outcome] += 1
        return {"not_enforced": list(what.pointers), "valid": checked.valid, "errors": checked.errors}


class _Choice:
    """The JSON of one choice, as far as it has come."""

    def __init__(self, parser: MessageParser) -> None:
        self._parser = parser
        self.content: list[str] = []
        self.calls: list[tuple[str, list[str]]] = []

    def read(self, output: RequestOutput) -> None:
        for part in self._parser.read(output):
            match part:
                case ContentDelta(text):
                    self.content.append(text)
                case ToolCallStart(_, _, name):
                    self.calls.append((name, []))
                case ToolCallArguments(index, fragment):
                    self.calls[index][1].append(fragment)


class CheckProcesses:
    """Where answers are checked; `close` ends them. Thread-safe."""

    def __init__(self) -> None:
        self._pool = ChildPool("protocol.check_child", (jsonschema_rs.__file__,), SECONDS)
        self.close = self._pool.close

    def check(self, schema: str, text: str, seconds: float) -> Checked:
        """A `Check`."""
        message = to_bytes(f'{{"schema":{schema},"text":{json.dumps(text)}}}')
        process: ChildProcess | None = None
        checked = Checked(None, [])
        try:
            process = self._pool.take_idle() or self._pool.start()
            checked = Checked(json.loads(process.exchange(message, seconds)[1]), [])
            if checked.valid is False:
                errors = json.loads(process.exchange(b"", ERROR_SECONDS)[1])
                checked = Checked(None, []) if errors is None else Checked(False, errors)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            logger.info("A check of an answer was ended (%s)", type(error).__name__)
            if process is not None:
                self._pool.end(process)
        else:
            self._pool.give_back(process)
        return checked
