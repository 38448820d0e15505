"""The prompt of a conversation: a line editor with history, completion and questions of several lines."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from app.commands.conversation import SETTABLE, is_open_block

MAX_HISTORY = 2**20  # bytes; of a longer file the second half is kept
_STYLE = Style.from_dict({"": "bold", "prompt": "ansicyan bold"})
_MARKS_PASTES, _TYPES_PASTES = "\x1b[?2004h", "\x1b[?2004l"


class Prompt:
    """The prompt on the terminal of standard input, with its history in a file. Tab completes any of `words`, and names
    of files after the commands that take one."""

    def __init__(self, history: Path, words: Sequence[str]) -> None:
        output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        output.enable_cpr = False  # a terminal that does not answer where its cursor is would delay the end
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", "> ")],
            style=_STYLE,
            multiline=Condition(lambda: is_open_block(get_app().current_buffer.text)),
            prompt_continuation="  ",
            history=_open_history(history),
            completer=_Completer([*words, *SETTABLE], WORD=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=keys,
            output=output,
        )

    def read(self, draft: str = "") -> str | None:
        """Return what the user enters, `draft` edited; None if the user leaves, by Ctrl-D or a second Ctrl-C."""
        for says in ("Ctrl-C again, Ctrl-D or /bye leaves.", ""):
            try:
                print()
                return self._session.prompt(default=draft)
            except EOFError:
                break
            except KeyboardInterrupt:
                draft = ""
                print(says)
        return None


class _Completer(WordCompleter):
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        command, blank, name = document.text_before_cursor.partition(" ")
        if blank and command in ("/load", "/save"):
            return PathCompleter(expanduser=True).get_completions(Document(name), complete_event)
        return super().get_completions(document, complete_event)


@contextmanager
def typed_ahead() -> Iterator[None]:
    """Keep what is typed during an answer, unseen, for the next prompt; a paste stays one question."""
    modes = termios.tcgetattr(sys.stdin)
    quiet = [*modes]
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    print(_MARKS_PASTES, end="", flush=True)
    try:
        yield
    finally:
        print(_TYPES_PASTES, end="", flush=True)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)


class _HistoryFile(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # a full disk, bytes that are no text
            super().store_string(string)


def _open_history(path: Path) -> History:
    """Return the history in a file that only its owner can read; one without a file if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if path.stat().st_size > MAX_HISTORY:
            path.write_bytes(path.read_bytes()[-MAX_HISTORY // 2 :])
    except OSError:
        return InMemoryHistory()
    return _HistoryFile(path)
