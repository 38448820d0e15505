"""What can be typed in `headrace chat` beside messages, and the conversation that it changes."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.server_client import printable
from app.settings import SettingsError

SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "stop", "ignore_eos", "reasoning_effort", "thinking_token_budget"),
)
"""Fields of chat completions that suit a conversation."""

HELP = """\
/set NAME VALUE   a field of requests from now on, such as /set temperature 0.5
/set NAME         leaves it to the server again; /set alone tells what is set
/system TEXT      the system prompt; without TEXT there is none
/reset            forgets what was said
/save FILE        writes the conversation as the JSON of a request
/exit             leaves, and so does Ctrl-D; Ctrl-C stops an answer
A blank before a slash sends the line to the model."""


class Conversation:
    """What was said, and how the next answer is asked for."""

    def __init__(self, model: str, defaults: Mapping[str, Any], *, system: str | None = None) -> None:
        self.model = model
        self.defaults = defaults  # of the server, where it tells them
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.fields: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        """The next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": system + self.messages, **self.fields}

    def set(self, name: str, text: str) -> None:
        """A field from now on; none of its own where `text` is empty. Raises `SettingsError`."""
        if name not in SETTABLE:
            raise SettingsError(f"There is no {name!r} to set. {_nearest(name, SETTABLE) or ', '.join(SETTABLE)}")
        if not text:
            self.fields.pop(name, None)
            return
        value: Any = text
        if name not in ("stop", "reasoning_effort"):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise SettingsError(f"{name}: got {text[:80]!r}, which is no number.") from None
        _check(name, value)
        self.fields[name] = value


class Commands:
    """Reads lines that begin with a slash."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.wants_to_leave = False
        self._commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/set": self._set,
            "/system": self._system,
            "/reset": self._reset,
            "/save": self._save,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    def take(self, line: str) -> str | None:
        """What the command has to say that the line is, when it is done; None if it is none."""
        word, _, rest = line.rstrip().partition(" ")
        if not re.fullmatch(r"/\w*", word):  # /etc/passwd is something to talk about
            return None
        if word not in self._commands:
            return f"There is no {word}. {_nearest(word, self._commands) or '/help tells what there is.'}"
        try:
            return self._commands[word](rest.strip())
        except SettingsError as error:
            return str(error)

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        conversation = self._conversation
        if name:
            conversation.set(name, text.strip())
        told = {**conversation.defaults, **conversation.fields}
        names = [name] if name else [each for each in SETTABLE if told.get(each) is not None]
        lines = (
            f"{each} {told.get(each, 'is left to the server')}{'' if each in conversation.fields else ' (default)'}"
            for each in names
        )
        return "\n".join(lines) or f"Nothing is set. There are {', '.join(SETTABLE)}."

    def _system(self, text: str) -> str:
        self._conversation.system = text or None
        return "It holds from the next answer on." if text else "There is no system prompt now."

    def _reset(self, _: str) -> str:
        self._conversation.messages.clear()
        return "Forgotten."

    def _save(self, name: str) -> str:
        if not name:
            return "A file is missing: /save conversation.json"
        # What was typed or said may have halves of characters, which are no UTF-8.
        text = json.dumps(self._conversation.body(), ensure_ascii=False, indent=2).encode("utf-8", "replace")
        try:
            path = Path(name).expanduser()
            with path.open("xb") as file:
                file.write(text)
        except (OSError, ValueError, RuntimeError) as error:  # of a byte 0, or of a user whom nobody knows
            return f"{printable(name)} cannot be written: {getattr(error, 'strerror', error)}. Name another file."
        return f"{len(self._conversation.messages)} messages are in {printable(str(path))}."

    def _exit(self, _: str) -> str:
        self.wants_to_leave = True
        return "Goodbye."


def _check(name: str, value: Any) -> None:
    """Raise `SettingsError` if no server would take it."""
    from engine.errors import InvalidRequest
    from protocol.body import parse_body
    from protocol.errors import ApiError
    from protocol.openai.chat import ChatCompletionRequest

    try:
        body = {"messages": [{"role": "user", "content": "?"}], name: value}
        parse_body(ChatCompletionRequest, json.dumps(body).encode()).to_sampling_params(vocab_size=1)
    except (InvalidRequest, ApiError) as error:
        raise SettingsError(str(error)) from None


def _nearest(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {found[0]}?" if found else ""
