"""Search for tags in text that comes in pieces, for the readers of reasoning and of tool calls.

If a tag is a special token of the vocabulary, only that token counts. The same characters from other tokens are text;
otherwise an answer about tags would lose words. The engine puts `SPECIAL_MARK` before the token's text,
`SpecialTagReader` replaces mark and tag by one character that no text contains (a stand-in), and readers look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.messages import SPECIAL_MARK


class SpecialTags:
    """The tags that are special tokens, and the character that stands in for each. Immutable.

    `ids` are the tags' token ids. `shown` says whether the client sees a tag that no reader took as syntax; otherwise
    it is left out like other special tokens.
    """

    def __init__(self, ids: Mapping[str, int], *, shown: bool = False) -> None:
        self.stand_ins = {tag: chr(0xDC00 + number) for number, tag in enumerate(ids)}
        self.stand_ins_of_ids = {token_id: self.stand_ins[tag] for tag, token_id in ids.items()}
        self._spellings = {ord(character): tag if shown else "" for tag, character in self.stand_ins.items()}

    def __bool__(self) -> bool:
        return bool(self.stand_ins)

    def stand_in(self, tag: str) -> str:
        """Return the character that stands in for the tag, or the tag itself if it is no special token."""
        return self.stand_ins.get(tag, tag)

    def spelled(self, text: str) -> str:
        """Return the text for the client, with tags or nothing in place of stand-ins."""
        return text.translate(self._spellings)


NO_SPECIAL_TAGS = SpecialTags({})


class SpecialTagReader:
    """Replace special tags by stand-ins in the text of one choice, as it comes."""

    def __init__(self, tags: SpecialTags) -> None:
        self._stand_ins = tags.stand_ins
        self._held = ""

    def feed_text(self, text: str) -> str:
        """Return the text so far with stand-ins; a tag that may be incomplete is held back."""
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
        """Return the text that was held back: a tag that a stop string has cut."""
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
