"""A conversation in the terminal: its messages, the fields of its requests, its files, and the commands that change it.

A file of a conversation is JSON, or Markdown if its name ends in .md; the dashboard's chat reads and writes the same:
{"headrace_conversation": 1, "title": ..., "model": ..., "created": ..., "system": ..., "messages": [{"role": ...,
"content": ..., "reasoning": ...}]}, and a heading `# TITLE` with a heading `## ROLE` before each text.
"""

from __future__ import annotations

import base64
import difflib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.client import ServerError, printable
from app.config.settings import SettingsError

SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "stop", "ignore_eos", "reasoning_effort", "thinking_token_budget"),
)
"""Fields of chat completions that suit a conversation."""

HELP = f"""\
/set NAME VALUE   set a field of all further requests, such as /set temperature 0.5. NAME is one of
                  {", ".join(SETTABLE[:6])},
                  {", ".join(SETTABLE[6:11])},
                  {", ".join(SETTABLE[11:])}
/set NAME         use the server's default again; /set alone lists what is set
/system TEXT      set the system prompt; /system alone shows it, /system off removes it
/model NAME       ask another model of the server; /model alone lists them
/show             show the model, what is set, and the conversation
/retry            ask the last question again
/undo             take back the last question with its answer, to edit it
/copy             copy the last answer to the clipboard of the terminal
/save FILE        write the conversation as JSON, or as Markdown if FILE ends in .md
/load FILE        go on with a conversation that was saved, here or by the dashboard's chat
/reset            forget the conversation
/bye              leave, as exit, quit, Ctrl-D and a second Ctrl-C do; one Ctrl-C stops an answer
A paste is one question, and so are the lines between two lines of \"\"\". Alt-Enter begins a new line, Tab completes
a command, Up brings back earlier questions. A blank before a slash sends the line to the model."""
ROLES = ("user", "assistant", "system", "tool")
MAX_TITLE = 60  # characters
MAX_COPIED = 74_000  # bytes of base64, more than which common terminals ignore
_HEADING = re.compile(r"^## (user|assistant|system)[ \t]*$", re.MULTILINE)
_LIKE_HEADING = re.compile(r"^(\\*## (?:user|assistant|system)[ \t]*)$", re.MULTILINE)


class Conversation:
    """The messages so far and the fields of the next request."""

    def __init__(self, model: str, defaults: Mapping[str, Any], *, system: str | None = None) -> None:
        self.model = model
        self.defaults = defaults  # of the server, if it reports them
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.unanswered = ""  # the last question, if no answer came to it
        self.fields: dict[str, Any] = {}
        self.title = ""  # of the file that was loaded
        self.created = datetime.now(UTC).isoformat(timespec="seconds")

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        sent = [{name: each[name] for name in each if name != "reasoning"} for each in self.messages]
        return {"model": self.model, "messages": system + sent, **self.fields}

    def set(self, name: str, text: str) -> None:
        """Set a field of all further requests, or unset it if `text` is empty. Raises `SettingsError`."""
        if name not in SETTABLE:
            raise SettingsError(f"There is no field {name!r}. {_nearest(name, SETTABLE) or ', '.join(SETTABLE)}")
        if not text:
            self.fields.pop(name, None)
            return
        value: Any = text
        if name not in ("stop", "reasoning_effort"):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise SettingsError(f"{name}: got {text[:80]!r}; allowed: a number") from None
        _check(name, value)
        self.fields[name] = value

    def take_back(self) -> str:
        """Remove the last question and its answer, and return the question; empty if there is none."""
        question, self.unanswered = self.unanswered, ""
        if not question:
            places = [number for number, each in enumerate(self.messages) if each["role"] == "user"]
            if places:
                question = self.messages[places[-1]]["content"]
                del self.messages[places[-1] :]
        return question

    # --- files

    def as_file(self, *, is_markdown: bool) -> bytes:
        """Return the content of its file. Halves of surrogate pairs, which UTF-8 has not, become question marks."""
        asked = next((each["content"] for each in self.messages if each["role"] == "user"), "Conversation")
        title = self.title or " ".join(asked.split())[:MAX_TITLE]
        if is_markdown:
            parts = [("system", self.system)] if self.system else []
            parts += [(each["role"], each["content"]) for each in self.messages if each["role"] in ROLES[:3]]
            escaped = ((role, _LIKE_HEADING.sub(r"\\\1", content)) for role, content in parts)
            texts = [f"# {title}\n", *(f"## {role}\n\n{content}\n" for role, content in escaped)]
            return "\n".join(texts).encode("utf-8", "replace")
        about = {"title": title, "model": self.model, "created": self.created, "system": self.system}
        content = {"headrace_conversation": 1, **about, "messages": self.messages}
        return json.dumps(content, ensure_ascii=False, indent=2).encode("utf-8", "replace")

    def read_file(self, content: bytes, *, is_markdown: bool) -> str | None:
        """Replace the messages by those of a file, and return the model that it names. Raises ValueError."""
        text = content.decode()
        found = _from_markdown(text) if is_markdown else json.loads(text)
        if not isinstance(found, dict) or found.get("headrace_conversation", 1) != 1:
            raise ValueError('its form is not "headrace_conversation": 1')
        messages, system = found.get("messages"), found.get("system") or None
        if not isinstance(messages, list) or not isinstance(system, str | None):
            raise ValueError("messages must be an array, and system a string or null")
        for number, each in enumerate(messages):
            is_message = isinstance(each, dict) and each.get("role") in ROLES
            if is_message and each.get("content") is None:  # calls without text, as OpenAI writes them
                each["content"] = ""
            if not is_message or not isinstance(each["content"], str):
                raise ValueError(f"messages.{number} needs a role ({', '.join(ROLES)}) and its content as text")
        if system is None and messages and messages[0]["role"] == "system":
            system = messages.pop(0)["content"]
        self.messages, self.system, self.unanswered = messages, system, ""
        self.title, self.created = (str(found.get(name) or "") for name in ("title", "created"))
        model = found.get("model")
        return model if isinstance(model, str) else None


def _from_markdown(text: str) -> dict[str, Any]:
    head, *parts = _HEADING.split(text.replace("\r\n", "\n"))
    texts = [re.sub(r"^\\(\\*## )", r"\1", each.strip("\n"), flags=re.MULTILINE) for each in parts[1::2]]
    messages = [{"role": role, "content": content} for role, content in zip(parts[::2], texts, strict=True)]
    if not messages:
        raise ValueError("it has no heading ## user")
    return {"title": head.strip().removeprefix("# "), "messages": messages}


class Commands:
    """The commands that begin with a slash, and the words that leave."""

    def __init__(self, conversation: Conversation, models: Callable[[], list[dict[str, Any]]]) -> None:
        """`models` returns the cards of the server's models."""
        self._conversation = conversation
        self._models = models
        self.wants_to_leave = False
        self.draft = ""  # the text of the next prompt
        self._file: Path | None = None  # that was written or read last
        self._commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/set": self._set,
            "/system": self._system,
            "/model": self._model,
            "/show": self._show,
            "/retry": self._retry,
            "/undo": self._undo,
            "/copy": self._copy,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/bye": self._exit,
            "/exit": self._exit,
            "/quit": self._exit,
        }
        self.names = tuple(self._commands)
        self._question = ""

    def take(self, text: str) -> tuple[str, str]:
        """Run what was typed if it is a command. Return the reply to show and the question to ask; either may be
        empty."""
        word, _, rest = text.rstrip().partition(" ")
        if word.lower() in ("exit", "quit", "bye") and not rest:
            word = "/exit"
        if not re.fullmatch(r"/\w*", word):  # /etc/passwd is part of a message
            return "", unquoted(text)
        if word not in self._commands:
            return f"There is no {word}. {_nearest(word, self.names) or '/help lists the commands.'}", ""
        self._question = ""
        try:
            return printable(self._commands[word](rest.strip())), self._question
        except (SettingsError, ServerError) as error:
            return printable(str(error)), ""
        except KeyboardInterrupt:  # of a server that does not answer
            return "", ""

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        conversation = self._conversation
        if name:
            conversation.set(name, text.strip())
        values = {**conversation.defaults, **conversation.fields}
        names = [name] if name else [each for each in SETTABLE if values.get(each) is not None]
        shown = {each: values.get(each, "is left to the server") for each in names}
        lines = (
            f"{each} {value}{'' if each in conversation.fields else ' (default)'}" for each, value in shown.items()
        )
        return "\n".join(lines) or f"Nothing is set. Allowed: {', '.join(SETTABLE)}."

    def _system(self, text: str) -> str:
        conversation = self._conversation
        if text == "off":
            conversation.system = None
        elif text:
            conversation.system = unquoted(text)
            return "The next answer uses it."
        return conversation.system or "There is no system prompt. /system TEXT sets one."

    def _model(self, name: str) -> str:
        cards = {card["id"]: card for card in self._models()}
        if not name:
            return "\n".join(f"{each} {card.get('status') or ''}" for each, card in cards.items())
        if name not in cards:
            return f"There is no model {name}. {_nearest(name, tuple(cards)) or '/model lists the models.'}"
        self._conversation.model = name
        self._conversation.defaults = cards[name].get("default_parameters") or {}
        return "It gives the next answer, and reads the conversation so far."

    def _show(self, _: str) -> str:
        conversation = self._conversation
        head = [f"model {conversation.model}", self._set("")]
        head += [f"system {conversation.system}"] if conversation.system else []
        texts = [f"{'> ' if each['role'] == 'user' else ''}{each['content']}" for each in conversation.messages]
        return "\n".join(head) + "".join(f"\n\n{text}" for text in texts)

    def _retry(self, _: str) -> str:
        self._question = self._conversation.take_back()
        return "" if self._question else "There is no question to ask again."

    def _undo(self, _: str) -> str:
        self.draft = self._conversation.take_back()
        return "" if self.draft else "There is no question to take back."

    def _copy(self, _: str) -> str:
        answers = [each["content"] for each in self._conversation.messages if each["role"] == "assistant"]
        if not answers:
            return "There is no answer to copy."
        coded = base64.b64encode(answers[-1].encode("utf-8", "replace")).decode()
        if len(coded) > MAX_COPIED:
            return "The answer is longer than terminals copy. /save FILE writes the conversation."
        sys.stdout.write(f"\x1b]52;c;{coded}\x07")
        return "The terminal was asked to copy the answer (OSC 52). If nothing arrives, it does not allow that."

    def _save(self, name: str) -> str:
        if not name and self._file is None:
            return "A file is missing: /save conversation.json"
        try:
            path = Path(name).expanduser() if name else self._file or Path()
            content = self._conversation.as_file(is_markdown=path.suffix == ".md")
            if path != self._file and path.exists():  # another file is never written over
                raise ValueError(os.strerror(errno.EEXIST))
            part = path.with_name(f"{path.name}.part")  # a full disk leaves what was saved before
            try:
                part.write_bytes(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, ValueError, RuntimeError) as error:  # a byte 0, or an unknown user
            return f"{name} cannot be written: {getattr(error, 'strerror', None) or error}. Give another file."
        self._file = path
        return f"{len(self._conversation.messages)} messages are in {path}."

    def _load(self, name: str) -> str:
        if not name:
            return "A file is missing: /load conversation.json"
        conversation = self._conversation
        try:
            path = Path(name).expanduser()
            if path.exists() and not path.is_file():  # a pipe, or a device without an end
                raise ValueError("it is no file")
            model = conversation.read_file(path.read_bytes(), is_markdown=path.suffix == ".md")
        except (OSError, ValueError, RuntimeError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            return f"{name} is no conversation that can be read: {why}. /save FILE writes one."
        self._file = path
        note = ""
        if model not in (None, conversation.model):
            is_here = model in [card["id"] for card in self._models()]
            note = f" {self._model(model)}" if model and is_here else f" {conversation.model} answers, not {model}."
        return f"{len(conversation.messages)} messages were read.{note} /show shows them."

    def _reset(self, _: str) -> str:
        self._conversation.messages.clear()
        self._conversation.title = self._conversation.unanswered = ""
        self._file = None
        return "The conversation is forgotten."

    def _exit(self, _: str) -> str:
        self.wants_to_leave = True
        return "Goodbye."


def is_open_block(text: str) -> bool:
    """Return True for a text that begins with three quotation marks and is not ended by three."""
    text = text.strip()
    return text.startswith('"""') and (len(text) < 6 or not text.endswith('"""'))


def unquoted(text: str) -> str:
    """Return the text without blanks and the marks of a block around it."""
    text = text.strip()
    return text[3:-3].strip("\n") if text.startswith('"""') and not is_open_block(text) else text


def _check(name: str, value: Any) -> None:
    """Raise `SettingsError` if a server would refuse the value."""
    from engine.errors import InvalidRequest
    from protocol.body import parse_body
    from protocol.errors import ApiError
    from protocol.openai.chat import ChatCompletionRequest

    try:
        body = {"messages": [{"role": "user", "content": "?"}], name: value}
        parse_body(ChatCompletionRequest, json.dumps(body).encode()).to_sampling_params(vocab_size=1)
    except (InvalidRequest, ApiError) as error:
        raise SettingsError(str(error)) from None


def _nearest(word: str, known: tuple[str, ...]) -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {found[0]}?" if found else ""
