"""`headrace chat`: a conversation in the terminal, with live Markdown, or one answer on standard output.

It is an HTTP client of a running server, or of one that it starts in a thread, on a free loopback port with a random
key. So Ctrl-C during an answer is a client that disconnects.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

import anyio
from pydantic import SecretStr
from rich.console import Console
from rich.markdown import Markdown

from app.client import ServerClient, ServerError, printable
from app.commands.conversation import Commands, Conversation
from app.config.settings import Settings, SettingsError

LEAST_FOR_FIGURES = 20  # tokens: the speed of a shorter answer says nothing
HISTORY_FILE = "chat_history"  # in the cache folder


def add_flags(parser: ArgumentParser) -> None:
    talk = parser.add_argument_group("the conversation")
    talk.add_argument("--url", help="A running server, such as http://127.0.0.1:8000. Default: start one here.")
    talk.add_argument("--system", help="The system prompt.")
    talk.add_argument("--temperature", help="0 is greedy. Default: the server's.")
    what = "A field of all requests, as /set of the conversation takes it. May be repeated."
    talk.add_argument("--set", dest="fields", action="append", default=[], metavar="NAME=VALUE", help=what)
    parser.set_defaults(question="")  # an argument without a flag, besides the model


def run(
    settings: Settings,
    *,
    url: str | None,
    system: str | None,
    temperature: str | None,
    fields: Sequence[str],
    question: str,
) -> int:
    """Talk to the server at `url`, with the first of `settings.api_keys`, or to one that runs in this process. Answer a
    `question`, or standard input that is no terminal, once."""
    is_asked_once = sys.stdin is None or not sys.stdin.isatty()
    piped = sys.stdin.buffer.read().decode("utf-8", "replace").strip() if is_asked_once and sys.stdin else ""
    if is_asked_once and not (question.strip() or piped):
        raise SettingsError("standard input is empty. Give a question: headrace chat 'Why is the sky blue?'")
    with _opened(settings, url) as client:
        cards = {card["id"]: card for card in client.models()}
        name, is_given = settings.model_names[0], settings.model_fields_set & {"model", "served_model_name"}
        if question in cards and not is_given and (piped or not is_asked_once):  # a single word
            name, question = question, ""
        elif name not in cards and is_given:
            advice = f"Give one of its models: {', '.join(cards)}. A question of one word ends with a question mark"
            raise SettingsError(f"{url} has no model {name!r}. {advice}")
        elif name not in cards:
            name = next(iter(cards))
        question = "\n\n".join(filter(None, (question.strip(), piped)))
        conversation = Conversation(name, cards[name].get("default_parameters") or {}, system=system)
        for field, value in (cards[name].get("chat_parameters") or {}).items():
            with suppress(SettingsError):  # another kind of server may have other parameters
                conversation.set(field, str(value))
        for given in (*fields, *(() if temperature is None else (f"temperature={temperature}",))):
            conversation.set(*given.partition("=")[::2])
        if not question:
            _converse(client, conversation, settings, tuple(cards))
            return 0
        conversation.messages.append({"role": "user", "content": question})
        *_, is_whole = _show(client, conversation, answers_once=True)
        return 0 if is_whole else 1


def _converse(client: ServerClient, conversation: Conversation, settings: Settings, models: Sequence[str]) -> None:
    from app.commands.prompt import Prompt, typed_ahead
    from gpu.checkpoint import default_cache_dir

    commands = Commands(conversation, client.models)
    history = (settings.cache_dir or default_cache_dir()) / HISTORY_FILE
    prompt = Prompt(history, (*commands.names, *models))
    print(f"{printable(conversation.model)}. /help lists commands; Ctrl-C stops an answer.")
    while not commands.wants_to_leave:
        draft, commands.draft = commands.draft, ""
        if (text := prompt.read(draft)) is None:
            return
        reply, question = commands.take(text)
        if reply:
            print(reply)
        if not question:
            continue
        conversation.messages.append({"role": "user", "content": question})
        with typed_ahead():
            answer, reasoning, _ = _show(client, conversation)
        if answer:
            message = {"role": "assistant", "content": answer}
            conversation.messages.append(message | ({"reasoning": reasoning} if reasoning else {}))
        else:
            conversation.messages.pop()  # two user turns in a row confuse many templates
        conversation.unanswered = "" if answer else question


def _show(client: ServerClient, conversation: Conversation, *, answers_once: bool = False) -> tuple[str, str, bool]:
    """Ask, show the answer while it arrives, and return its text and reasoning, and False if an error ended it.
    `answers_once` shows neither reasoning nor figures, and lets Ctrl-C pass."""
    console = Console()
    live = LiveMarkdown(console) if console.is_terminal else None
    shows_more = live is not None and not answers_once
    pieces: list[str] = []
    thoughts: list[str] = []
    stream = client.stream(conversation.body())
    figures = Figures()
    is_thinking, is_whole = False, True
    try:
        for chunk in stream:
            with client.understood():
                thought, said = figures.read(chunk)
            thoughts.append(thought)
            if thought and shows_more:
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
        if answers_once:
            raise
        figures.finish_reason = "stopped by you"
    except ServerError as error:
        is_whole = False
        sys.stdout.flush()
        advice = "" if answers_once else "\n/retry asks again, /reset starts over."
        print(f"\n{error}{advice}", file=sys.stderr)
    finally:
        stream.close()
        if live is not None:
            live.end()
        elif pieces:
            print()
    with suppress(KeyboardInterrupt, ServerError), client.understood():
        if shows_more and pieces:
            figures.timeline = _timeline(client)
            if says := str(figures):
                console.print(says, style="dim", markup=False, highlight=False)
    return "".join(pieces), "".join(thoughts), is_whole


def _timeline(client: ServerClient) -> dict[str, Any]:
    """Return the server's timeline of the latest answer; empty if it keeps none."""
    for _ in range(3 if client.request_id else 0):
        with suppress(ServerError, ValueError):
            found: dict[str, Any] = json.loads(client.get(f"/v1/requests/{quote(client.request_id or '')}/timeline"))
            return found
        time.sleep(0.05)  # it is there when the server has noticed the end
    return {}


class Figures:
    """Speed, token counts and finish reason of one answer."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self._usage = (0, 0, 0)  # tokens: of the prompt, of the answer, and of the prompt from the prefix cache
        self.timeline: dict[str, Any] = {}  # the server's, since several pieces may reach the client in one read

    def read(self, chunk: dict[str, Any]) -> tuple[str, str]:
        """Return the reasoning and the text of a chunk, and note its counts."""
        if usage := chunk.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._usage = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]), int(cached or 0))
        thought, said = "", ""
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
            said += delta.get("content") or ""
            self.finish_reason = printable(choice.get("finish_reason") or "") or self.finish_reason
        return thought, said

    def __str__(self) -> str:
        parts = []
        prompt_tokens, tokens, cached = self._usage
        if (tokens := tokens or self.timeline.get("output_tokens") or 0) >= LEAST_FOR_FIGURES:
            seconds = {each["name"]: each["seconds"] for each in self.timeline.get("segments", ())}
            parts.append(f"{tokens} tokens")
            if decode := seconds.pop("decode", 0.0):
                seconds.pop("deliver", None)
                parts[0] += f", {(tokens - 1) / decode:.1f} tok/s"
                parts.append(f"first token after {sum(seconds.values()):.2f} s")
            if cached:
                parts.append(f"{cached} of {prompt_tokens} prompt tokens cached")
        if self.finish_reason not in ("", "stop"):
            parts.append({"length": "cut off: no more tokens were allowed"}.get(self.finish_reason, self.finish_reason))
        return "; ".join(parts)


@contextmanager
def _opened(settings: Settings, url: str | None) -> Iterator[ServerClient]:
    """Open the server at `url`, or run one in a thread."""
    if url is not None:
        yield ServerClient(url, settings.api_keys[0].get_secret_value() if settings.api_keys else None)
        return
    from app.application import create_app
    from app.serving.process import bind, run

    key = secrets.token_urlsafe(32)
    own = {"host": "127.0.0.1", "port": 0, "uds": None, "api_keys": (SecretStr(key),), "drain_timeout": 1.0}
    settings = settings.model_copy(update=own | {"log_requests": False, "log_level": "error"})
    listener = bind(settings)
    client = ServerClient(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    stop = threading.Event()

    async def stopped() -> None:
        await anyio.to_thread.run_sync(stop.wait, abandon_on_cancel=True)

    given = create_app(settings), settings, listener, stopped
    thread = threading.Thread(target=run, args=given, name="headrace-server", daemon=True)
    thread.start()
    try:
        with Console(stderr=True).status("Starting") as status:
            client.wait_until_ready(status.update)
        yield client
    finally:
        stop.set()
        thread.join()


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
            child.content = printable(child.content)  # links and entities may stand for escape sequences
            child.type = {"softbreak": "hardbreak", "html_inline": "text"}.get(child.type, child.type)
    return markdown
