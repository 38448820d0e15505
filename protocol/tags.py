"""Looking for tags in text that comes in pieces. Used by the readers of reasoning and of tool calls.

Where a tag is a special token of the vocabulary, only this token counts: the same spelled by other tokens is text, or
an answer that speaks of tags would lose words. The engine marks the token's text (`SPECIAL_MARK`), `SpecialTagReader`
makes one character of mark and tag, which no text holds, and readers look for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.messages import SPECIAL_MARK


class SpecialTags:
    """The tags that are special tokens, by their ids, each with a character that stands for it. Immutable.

    `shown` says whether a tag that is no syntax where it stands is text; otherwise it is left out, as other special
    tokens are.
    """

    def __init__(self, ids: Mapping[str, int], *, shown: bool = False) -> None:
        self.stand_ins = {tag: chr(0xDC00 + number) for number, tag in enumerate(ids)}
        self.stand_ins_of_ids = {token_id: self.stand_ins[tag] for tag, token_id in ids.items()}
        self._spellings = {ord(character): tag if shown else "" for tag, character in self.stand_ins.items()}

    def __bool__(self) -> bool:
        return bool(self.stand_ins)

    def stand_in(self, tag: str) -> str:
        """What stands for the tag in text: itself, if it is no special token."""
        return self.stand_ins.get(tag, tag)

    def spelled(self, text: str) -> str:
        """The text for the client, without stand-ins."""
        return text.translate(self._spellings)


NO_SPECIAL_TAGS = SpecialTags({})


class SpecialTagReader:
    """Puts stand-ins into the text of one choice, as it comes."""

    def __init__(self, tags: SpecialTags) -> None:
        self._stand_ins = tags.stand_ins
        self._held = ""

    def feed_text(self, text: str) -> str:
        """What is decided by `text`, with stand-ins."""
        if not self._held and SPECIAL_MARK not in text:
            return text
        text, self._held = self._held + text, ""
        plain, *marked = text.split(SPECIAL_MARK)
        for number, piece in enumerate(marked, 1):
            tag = max((tag for tag in self._stand_ins if piece.startswith(tag)), key=len, default="")
            if number == len(marked) and not tag and any(tag.startswith(piece) for tag in self._stand_ins):
                self._held = SPECIAL_MARK + piece
                break
            plain += self._stand_ins.get(tag, "") + piece.removeprefix(tag)
        return plain

    def finish_text(self) -> str:
        """What was held back: a stop string has cut a tag."""
        return self._held.removeprefix(SPECIAL_MARK)


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
