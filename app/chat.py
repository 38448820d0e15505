"""`headrace chat`: a conversation in the terminal.

It speaks HTTP to a server: to one that runs already, or to one that it starts for itself in a thread, on a free port
of the loopback address and behind a key that only it knows. So a conversation goes the way of every other request,
and Ctrl-C in the middle of an answer is a client that leaves.
"""

from __future__ import annotations

import readline  # gives input() line editing and history
import secrets
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
from pydantic import SecretStr
from rich.console import Console

from app.chat_commands import HELP, Commands, Conversation
from app.live_markdown import LiveMarkdown
from app.server_client import ServerClient, ServerError, printable
from app.settings import Settings, SettingsError


def chat_with(url: str, settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Talk to the server at `url`, with the first of `settings.api_keys` if there is one."""
    client = ServerClient(url, settings.api_keys[0].get_secret_value() if settings.api_keys else None)
    # Another server has its own models: ask for what the user named, else for whatever it serves.
    cards = {card["id"]: card for card in client.models()}
    name = settings.model_names[0] if settings.model_names[0] in cards else next(iter(cards))
    _converse(client, cards[name], system=system, temperature=temperature)
    return 0


def chat_here(settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Run the server in this process and talk to it."""
    key = secrets.token_urlsafe(32)
    settings = settings.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
            "api_keys": (SecretStr(key),),
            "drain_timeout": 1.0,
            "log_requests": False,
            "log_level": "error",
        }
    )
    with _server(settings) as url:
        client = ServerClient(url, key)
        with Console(stderr=True).status("Starting") as status:
            client.wait_until_ready(status.update)
        _converse(client, client.models()[0], system=system, temperature=temperature)
    return 0


def _converse(client: ServerClient, card: dict[str, Any], *, system: str | None, temperature: float | None) -> None:
    conversation = Conversation(card["id"], card.get("default_parameters") or {}, system=system)
    for name, value in (card.get("chat_parameters") or {}).items():
        with suppress(SettingsError):  # another server, another idea of them
            conversation.set(name, str(value))
    if temperature is not None:
        conversation.set("temperature", str(temperature))
    commands = Commands(conversation)
    readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted paragraph is one question; Python has it off
    print(f"{printable(conversation.model)}. /help tells what can be typed here; Ctrl-C stops an answer.")
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
    """Turn echo off while an answer is written: the next prompt shows what was typed meanwhile."""
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
    """Ask, and show the answer while it comes. Returns it, as far as it came."""
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
    """How an answer came: what its chunks say, and when they were here."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first = self._last = 0.0
        self._usage: dict[str, int] = {}
        self._cached = 0
        self.finish_reason = ""

    def read(self, chunk: dict[str, Any]) -> tuple[str, str]:
        """The reasoning and the answer that a chunk brings."""
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
        told = []
        if self._first:
            told.append(f"first token after {self._first - self._asked:.2f} s")
        if (tokens := self._usage.get("completion_tokens", 0)) > 1 and self._last > self._first:
            told.insert(0, f"{tokens} tokens, {(tokens - 1) / (self._last - self._first):.1f} tok/s")
        if self._cached:
            told.append(f"{self._cached} of {self._usage['prompt_tokens']} prompt tokens cached")
        if self.finish_reason not in ("", "stop"):
            told.append({"length": "cut off: no more tokens were allowed"}.get(self.finish_reason, self.finish_reason))
        return "; ".join(told)


@contextmanager
def _server(settings: Settings) -> Iterator[str]:
    from app.application import create_app
    from app.runner import bind, run

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
