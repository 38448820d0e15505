"""`headrace chat`: a conversation in the terminal, with live Markdown.

It is an HTTP client of a running server, or of one that it starts in a thread, on a free loopback port with a random
key. So Ctrl-C during an answer is a client that disconnects.
"""

from __future__ import annotations

import difflib
import json
import re
import readline
import secrets
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from pydantic import SecretStr
from rich.console import Console
from rich.markdown import Markdown

from app.client import ServerClient, ServerError, printable
from app.config.settings import Settings, SettingsError


def chat_with(url: str, settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Talk to the server at `url`, with the first of `settings.api_keys` if there is one."""
    client = ServerClient(url, settings.api_keys[0].get_secret_value() if settings.api_keys else None)
    # If the server does not have the model of the settings, its first model is used.
    cards = {card["id"]: card for card in client.models()}
    name = settings.model_names[0] if settings.model_names[0] in cards else next(iter(cards))
    _converse(client, cards[name], system=system, temperature=temperature)
    return 0


def chat_here(settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Run the server in this process and talk to it."""
    key = secrets.token_urlsafe(32)
    own = {"host": "127.0.0.1", "port": 0, "uds": None, "api_keys": (SecretStr(key),), "drain_timeout": 1.0}
    settings = settings.model_copy(update=own | {"log_requests": False, "log_level": "error"})
    with _server(settings) as url:
        client = ServerClient(url, key)
        with Console(stderr=True).status("Starting") as status:
            client.wait_until_ready(status.update)
        _converse(client, client.models()[0], system=system, temperature=temperature)
    return 0


def _converse(client: ServerClient, card: dict[str, Any], *, system: str | None, temperature: float | None) -> None:
    conversation = Conversation(card["id"], card.get("default_parameters") or {}, system=system)
    for name, value in (card.get("chat_parameters") or {}).items():
        with suppress(SettingsError):  # another kind of server may have other parameters
            conversation.set(name, str(value))
    if temperature is not None:
        conversation.set("temperature", str(temperature))
    commands = Commands(conversation, client.models)
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted paragraph is one question; off by default
    print(f"{printable(conversation.model)}. /help lists commands; Ctrl-C stops an answer.")
    while not commands.wants_to_leave:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if (said := commands.take(line)) is not None:
            print(said)
            continue
        if not line.strip():
            continue
        conversation.messages.append({"role": "user", "content": line.strip()})
        with _no_echo():
            answer = _show(client, conversation)
        if answer:
            conversation.messages.append({"role": "assistant", "content": answer})
        else:
            conversation.messages.pop()  # two user turns in a row confuse many templates


@contextmanager
def _no_echo() -> Iterator[None]:
    """Turn echo off during an answer. Text that is typed then appears at the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    modes = termios.tcgetattr(sys.stdin)
    quiet = [*modes]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)


def _show(client: ServerClient, conversation: Conversation) -> str:
    """Ask, show the answer while it arrives, and return it, even if it is incomplete."""
    console = Console()
    live = LiveMarkdown(console) if console.is_terminal else None
    pieces: list[str] = []
    stream = client.stream(conversation.body())
    figures = Figures()
    is_thinking = False
    try:
        for chunk in stream:
            with client.understood():
                thought, said = figures.read(chunk)
            if thought and live is not None:
                console.print(printable(thought), style="dim", end="", markup=False, highlight=False)
                is_thinking = True
            if not said:
                continue
            if is_thinking:
                print("\n")
                is_thinking = False
            pieces.append(said)
            if live is None:
                print(printable(said), end="", flush=True)
            else:
                live.feed(printable(said))
    except KeyboardInterrupt:
        figures.finish_reason = "stopped by you"
    except ServerError as error:
        sys.stdout.flush()
        print(f"\n{error}\n/reset starts over.", file=sys.stderr)
    finally:
        stream.close()
    if live is None:
        print()
    else:
        live.end()
        console.print(str(figures), style="dim", markup=False, highlight=False)
    return "".join(pieces)


class Figures:
    """Speed, token counts and finish reason of one answer."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first = self._last = 0.0
        self._usage: dict[str, int] = {}
        self._cached = 0
        self.finish_reason = ""

    def read(self, chunk: dict[str, Any]) -> tuple[str, str]:
        """Return the reasoning and the text of a chunk, and note its time and counts."""
        if usage := chunk.get("usage"):
            self._usage = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
            self._cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        thought, said = "", ""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
            said += delta.get("content") or ""
            self.finish_reason = printable(choice.get("finish_reason") or "") or self.finish_reason
        if thought or said:
            self._last = time.monotonic()
            self._first = self._first or self._last
        return thought, said

    def __str__(self) -> str:
        parts = []
        if self._first:
            parts.append(f"first token after {self._first - self._asked:.2f} s")
        if (tokens := self._usage.get("completion_tokens", 0)) > 1 and self._last > self._first:
            parts.insert(0, f"{tokens} tokens, {(tokens - 1) / (self._last - self._first):.1f} tok/s")
        if self._cached:
            parts.append(f"{self._cached} of {self._usage['prompt_tokens']} prompt tokens cached")
        if self.finish_reason not in ("", "stop"):
            parts.append({"length": "cut off: no more tokens were allowed"}.get(self.finish_reason, self.finish_reason))
        return "; ".join(parts)


@contextmanager
def _server(settings: Settings) -> Iterator[str]:
    from app.application import create_app
    from app.serving.process import bind, run

    listener = bind(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = threading.Event()

    async def stopped() -> None:
        await anyio.to_thread.run_sync(stop.wait, abandon_on_cancel=True)

    thread = threading.Thread(
        target=run, args=(create_app(settings), settings, listener, stopped), name="headrace-server", daemon=True
    )
    thread.start()
    try:
        yield url
    finally:
        stop.set()
        thread.join()


# -------------------------------------------------------------------------------------------------------- chat commands
# The conversation, and the commands that change it.


SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "stop", "ignore_eos", "reasoning_effort", "thinking_token_budget"),
)
"""Fields of chat completions that suit a conversation."""

HELP = """\
/set NAME VALUE   set a field of all further requests, such as /set temperature 0.5
/set NAME         use the server's default again; /set alone lists what is set
/system TEXT      set the system prompt; without TEXT remove it
/model NAME       ask another model of the server; without NAME list them
/reset            forget the conversation
/save FILE        write the conversation as the JSON of a request
/exit             leave, as Ctrl-D does; Ctrl-C stops an answer
A blank before a slash sends the line to the model."""


class Conversation:
    """The messages so far and the fields of the next request."""

    def __init__(self, model: str, defaults: Mapping[str, Any], *, system: str | None = None) -> None:
        self.model = model
        self.defaults = defaults  # of the server, if it reports them
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.fields: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": system + self.messages, **self.fields}

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


class Commands:
    """The commands that begin with a slash."""

    def __init__(self, conversation: Conversation, models: Callable[[], list[dict[str, Any]]]) -> None:
        """`models` returns the cards of the server's models."""
        self._conversation = conversation
        self._models = models
        self.wants_to_leave = False
        self._commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/set": self._set,
            "/system": self._system,
            "/model": self._model,
            "/reset": self._reset,
            "/save": self._save,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    def take(self, line: str) -> str | None:
        """Run the line if it is a command and return its reply; return None for a message."""
        word, _, rest = line.rstrip().partition(" ")
        if not re.fullmatch(r"/\w*", word):  # /etc/passwd is part of a message
            return None
        if word not in self._commands:
            return f"There is no {word}. {_nearest(word, self._commands) or '/help lists the commands.'}"
        try:
            return self._commands[word](rest.strip())
        except (SettingsError, ServerError) as error:
            return str(error)

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
        self._conversation.system = text or None
        return "The next answer uses it." if text else "There is no system prompt now."

    def _model(self, name: str) -> str:
        cards = {card["id"]: card for card in self._models()}
        if not name:
            return "\n".join(f"{printable(each)} {printable(card.get('status') or '')}" for each, card in cards.items())
        if name not in cards:
            return f"There is no model {printable(name)}. {_nearest(name, cards) or '/model lists the models.'}"
        self._conversation.model = name
        self._conversation.defaults = cards[name].get("default_parameters") or {}
        return "It gives the next answer, and reads the conversation so far."

    def _reset(self, _: str) -> str:
        self._conversation.messages.clear()
        return "The conversation is forgotten."

    def _save(self, name: str) -> str:
        if not name:
            return "A file is missing: /save conversation.json"
        # Text may contain half a surrogate pair, which UTF-8 cannot encode.
        text = json.dumps(self._conversation.body(), ensure_ascii=False, indent=2).encode("utf-8", "replace")
        try:
            path = Path(name).expanduser()
            with path.open("xb") as file:
                file.write(text)
        except (OSError, ValueError, RuntimeError) as error:  # a byte 0, or an unknown user
            return f"{printable(name)} cannot be written: {getattr(error, 'strerror', error)}. Give another file."
        return f"{len(self._conversation.messages)} messages are in {printable(str(path))}."

    def _exit(self, _: str) -> str:
        self.wants_to_leave = True
        return "Goodbye."


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


def _nearest(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {found[0]}?" if found else ""


# -------------------------------------------------------------------------------------------------------- live markdown
# Markdown in a terminal while it arrives.
#
# New text changes the look of its own paragraph only. So finished paragraphs are printed once, and of the last one only
# the lines that changed are printed again: nothing blinks, and the time per piece does not grow with the answer.


_INTERVAL = 0.05  # the least seconds between two updates
_BUSY = 0.1  # the largest share of a processor for drawing: the engine may run in this process
# The start of a paragraph of its own: after an empty line, not indented, no list, quotation or table.
_NEXT_PARAGRAPH = re.compile(r"\n\n(?=[^\s\-*+\d>|])")
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)


class LiveMarkdown:
    """One answer on a console that is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._paragraph = ""  # the last one, which may change
        self._lines: list[str] = []  # its lines on the screen
        self._next_update = 0.0

    def feed(self, text: str) -> None:
        """Append `text` and show it, now or with later text."""
        self._paragraph += text
        now = time.monotonic()
        if now >= self._next_update:
            self._show()
            took = time.monotonic() - now
            self._next_update = now + max(_INTERVAL, took / _BUSY)

    def end(self) -> None:
        """Show all text so far."""
        self._show()

    def _show(self) -> None:
        while end := self._whole_paragraph():
            self._draw(self._paragraph[:end])
            self._console.file.write("\n")
            self._paragraph, self._lines = self._paragraph[end:].lstrip("\n"), []
        self._draw(self._paragraph)

    def _whole_paragraph(self) -> int:
        """Return the end of the first paragraph if it is final, else 0."""
        text = self._paragraph
        ends = (found.start() for found in _NEXT_PARAGRAPH.finditer(text))
        return next((end for end in ends if len(_FENCE.findall(text, 0, end)) % 2 == 0), 0)

    def _draw(self, paragraph: str) -> None:
        with self._console.capture() as capture:
            self._console.print(_markdown(paragraph))
        lines = capture.get().splitlines()
        same = 0
        while same < min(len(lines), len(self._lines)) and lines[same] == self._lines[same]:
            same += 1
        # Lines that scrolled off the screen cannot be changed.
        up = min(len(self._lines) - same, self._console.height - 1)
        changed = lines[len(self._lines) - up :]
        move = f"\x1b[{up}A" if up else ""
        self._console.file.write(move + "".join(f"{line}\x1b[K\n" for line in changed) + "\x1b[J")
        self._console.file.flush()
        self._lines = lines


def _markdown(text: str) -> Markdown:
    """Parse Markdown, but keep the model's line breaks and show HTML as text, which rich would drop."""
    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    for token in markdown.parsed:
        if token.type == "html_block":
            token.type = "code_block"
        for child in token.children or ():
            child.type = {"softbreak": "hardbreak", "html_inline": "text"}.get(child.type, child.type)
    return markdown
