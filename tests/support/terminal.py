"""A terminal for the commands that people use in one: what is typed goes in, what is shown comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Self

from tests.support.harness import REPOSITORY, TIMEOUT

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _take_terminal() -> None:
    """In the new process: the terminal is its own, and Ctrl-C means it, also where the tests run in the background of a
    shell, which has it ignored. Takes no lock."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """Runs `headrace` with these arguments in a terminal of its own; a context manager."""

    def __init__(
        self, *arguments: str, rows: int = 40, columns: int = 100, environment: dict[str, str] | None = None
    ) -> None:
        self.shown = ""  # all of it, as it came
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] |= termios.NOFLSH  # Ctrl-C would drop what is shown in the same moment
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.resize(rows, columns)
        # COLUMNS and LINES would win over the size of this terminal.
        left_out = ("HEADRACE_", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.commands.cli", *arguments],
            cwd=REPOSITORY,
            env=inherited | {"TERM": "xterm-256color"} | (environment or {}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What comes up to and with `pattern`, a regular expression, without escape sequences."""
        deadline = time.monotonic() + TIMEOUT
        seen = ""
        while not (found := re.search(pattern, plain := ESCAPES.sub("", seen).replace("\r", ""))):
            assert time.monotonic() < deadline, f"no {pattern!r} in {plain[-500:]!r}"
            ready, _, _ = select.select([self._master], [], [], 1.0)
            if ready:
                try:
                    piece = os.read(self._master, 65536).decode("utf-8", "replace")
                except OSError:  # its other end is closed
                    raise AssertionError(f"it ended without {pattern!r}: {plain[-500:]!r}") from None
                seen += piece
                self.shown += piece
        return plain[: found.end()]

    def wait_exit(self) -> int:
        return self.process.wait(TIMEOUT)
