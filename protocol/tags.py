"""Looking for tags in text that comes in pieces. Used by the readers of reasoning and of tool calls."""

from __future__ import annotations

from collections.abc import Sequence


def find_tag(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `tags` is in `text`, and which one it is. Of two at one place, the longer one."""
    found = [(start, -len(tag), tag) for tag in tags if (start := text.find(tag)) >= 0]
    if not found:
        return None
    start, _, tag = min(found)
    return start, tag


def unfinished_tag(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that could still become one of `tags`."""
    return max((_overlap(text, tag) for tag in tags), default=0)


def _overlap(text: str, tag: str) -> int:
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class Padding:
    """Holds white space back until it is known what it stands before: text keeps it, a tag or the end may drop it.

    Pieces that are nothing but white space cost the same each, however many have come.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[str] = []

    def hold_back(self, text: str) -> str:
        """`text` after what was held back, without the white space that it ends with."""
        kept = text.rstrip()
        if not kept:
            if text:
                self._held.append(text)
            return ""
        before, self._held = "".join(self._held), [text[len(kept) :]] if len(kept) < len(text) else []
        return before + kept

    def take(self) -> str:
        """What is held back, which is forgotten."""
        held, self._held = "".join(self._held), []
        return held
