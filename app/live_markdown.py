"""Markdown in a terminal while it is written.

What is written changes how its own paragraph looks, and nothing before that. So whole paragraphs are printed once, and
of the last one only those lines are written again that look otherwise than they did: nothing blinks, and the time that
an answer takes to show does not grow with its length.
"""

from __future__ import annotations

import re
import time

from rich.console import Console
from rich.markdown import Markdown

_INTERVAL = 0.05  # seconds between two looks at least
_BUSY = 0.1  # the share of a processor that drawing may take: the engine may run in this process
# A line behind an empty one that belongs to nothing above it: neither indented nor of a list, a quotation or a table.
_NEXT_PARAGRAPH = re.compile(r"\n\n(?=[^\s\-*+\d>|])")
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)


class LiveMarkdown:
    """One answer on one console, which has to be a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._paragraph = ""  # the last one, which may change
        self._lines: list[str] = []  # of it, as they are on the screen
        self._next_look = 0.0

    def feed(self, text: str) -> None:
        """Show `text` behind what is there, now or with what follows."""
        self._paragraph += text
        now = time.monotonic()
        if now >= self._next_look:
            self._show()
            took = time.monotonic() - now
            self._next_look = now + max(_INTERVAL, took / _BUSY)

    def end(self) -> None:
        """Show all that was fed."""
        self._show()

    def _show(self) -> None:
        while end := self._whole_paragraph():
            self._draw(self._paragraph[:end])
            self._console.file.write("\n")
            self._paragraph, self._lines = self._paragraph[end:].lstrip("\n"), []
        self._draw(self._paragraph)

    def _whole_paragraph(self) -> int:
        """Where the first paragraph ends that nothing can change any more; 0 if there is none."""
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
        # What has left the screen at its top cannot be changed any more.
        up = min(len(self._lines) - same, self._console.height - 1)
        changed = lines[len(self._lines) - up :]
        move = f"\x1b[{up}A" if up else ""
        self._console.file.write(move + "".join(f"{line}\x1b[K\n" for line in changed) + "\x1b[J")
        self._console.file.flush()
        self._lines = lines


def _markdown(text: str) -> Markdown:
    """Line breaks as the model has written them, and HTML as text: it would be left out else."""
    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    for token in markdown.parsed:
        if token.type == "html_block":
            token.type = "code_block"
        for child in token.children or ():
            child.type = {"softbreak": "hardbreak", "html_inline": "text"}.get(child.type, child.type)
    return markdown
