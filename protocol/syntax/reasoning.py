"""Reasoning between tags: `THINK` (Qwen 3, DeepSeek R1 and most others) or `BRACKETS` (Magistral).

The opening tag counts only where the text begins, so an answer may mention tags. Many templates open the reasoning in
the prompt; then the text begins within it. White space around the tags belongs to neither side.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from engine.messages import SPECIAL_MARK

_Json = Literal["hermes", "llama3", "mistral", "mistral_v11", "granite", "phi4_mini"]
_Sections = Literal["deepseek_v3", "deepseek_v31", "kimi_k2"]
_Parameters = Literal["qwen3_coder", "seed_oss", "glm", "minimax", "deepseek_v32", "deepseek_v4"]
ToolParser = Literal["auto", "harmony", _Json, _Sections, _Parameters, "gemma4", "lfm2", "pythonic", "none"]
"""The values of the setting `tool_parser`: the names of the records, `auto` and `none`."""
ReasoningParser = Literal["auto", "think", "none"]
PROMPT_TAIL = 16
"""Tokens at the end of a prompt that may open the reasoning."""

# ----------------------------------------------------------------------------------------------------------------- tags
# Tags in text that comes in pieces.
#
# If a tag is a special token of the vocabulary, only that token counts; the same characters from other tokens are text,
# so that an answer about tags loses no words. The engine puts `SPECIAL_MARK` before the token's text,
# `SpecialTagReader` replaces mark and tag by one character that no text contains (a stand-in), and readers look for it.


class SpecialTags:
    """The tags that are special tokens, and a stand-in for each. Immutable.

    `ids` are the tags' token ids. With `shown`, the client sees a tag that no reader took as syntax.
    """

    def __init__(self, ids: Mapping[str, int], *, shown: bool = False) -> None:
        self.stand_ins = {tag: chr(0xDC00 + number) for number, tag in enumerate(ids)}
        self.stand_ins_of_ids = {token_id: self.stand_ins[tag] for tag, token_id in ids.items()}
        self._spellings = {ord(character): tag if shown else "" for tag, character in self.stand_ins.items()}

    def __bool__(self) -> bool:
        return bool(self.stand_ins)

    def stand_in(self, text: str) -> str:
        """Return a text of tags with the characters that stand in for them; tags that are no special tokens stay."""
        for tag, character in self.stand_ins.items():
            text = text.replace(tag, character)
        return text

    def spelled(self, text: str) -> str:
        """Return the text for the client, with tags or nothing in place of stand-ins."""
        return text.translate(self._spellings)


NO_SPECIAL_TAGS = SpecialTags({})


class SpecialTagReader:
    """Replaces special tags by stand-ins in the text of one choice, as it comes."""

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
    """Return the place of the first of `tags` in `text`, and this tag; if two begin there, the longer one."""
    found = [(start, -len(tag), tag) for tag in tags if (start := text.find(tag)) >= 0]
    if not found:
        return None
    start, _, tag = min(found)
    return start, tag


def unfinished_tag(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that could still become one of `tags`."""
    lengths = range(min(max(map(len, tags), default=1) - 1, len(text)), 0, -1)
    return next((size for size in lengths if any(len(tag) > size and text.endswith(tag[:size]) for tag in tags)), 0)


class Padding:
    """Holds white space back until what follows is known: text keeps it, a tag or the end may drop it.

    The cost of a piece of white space does not depend on the number of pieces before it.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[str] = []

    def hold_back(self, text: str) -> str:
        """Return what was held back and `text`, without the white space at its end."""
        kept = text.rstrip()
        if not kept:
            if text:
                self._held.append(text)
            return ""
        before, self._held = "".join(self._held), [text[len(kept) :]] if len(kept) < len(text) else []
        return before + kept

    def take(self) -> str:
        """Return the white space that is held back, and hold it no longer."""
        held, self._held = "".join(self._held), []
        return held


class ReasoningTags(NamedTuple):
    """The tags around the reasoning."""

    opening: str
    closing: str


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")


class _Stage(enum.Enum):
    BEFORE = enum.auto()  # only white space and perhaps a part of the opening tag so far
    INSIDE_START = enum.auto()  # in the reasoning; only white space of it has come
    INSIDE = enum.auto()
    ANSWER_START = enum.auto()  # after the reasoning: only white space has come
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Splits the text of one choice into reasoning and answer, as it comes."""

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        self._tags = tags
        self._stage = _Stage.INSIDE_START if is_open else _Stage.BEFORE
        self._held = ""  # what may become a tag
        self._padding = Padding()  # white space that the reasoning may end with

    def feed_text(self, text: str) -> tuple[str, str]:
        if self._stage is _Stage.ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._stage is _Stage.BEFORE:
            start = text.lstrip()
            if start.startswith(self._tags.opening):
                self._stage, text = _Stage.INSIDE_START, start.removeprefix(self._tags.opening)
            elif self._tags.opening.startswith(start):
                self._held = text
                return "", ""
            else:
                self._stage = _Stage.ANSWER
        if self._stage in (_Stage.INSIDE_START, _Stage.INSIDE):
            reasoning, text = self._inside(text)
        if self._stage is _Stage.ANSWER_START and (text := text.lstrip()):
            self._stage = _Stage.ANSWER
        return reasoning, text

    def finish_text(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._stage is _Stage.INSIDE:
            return self._padding.take() + held, ""
        return (held.lstrip(), "") if self._stage is _Stage.INSIDE_START else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        """Return the reasoning in `text`, and the text after its end."""
        answer = ""
        end = text.find(self._tags.closing)
        if end >= 0:
            text, answer = text[:end], text[end + len(self._tags.closing) :]
        elif length := unfinished_tag(text, [self._tags.closing]):
            text, self._held = text[:-length], text[-length:]
        if self._stage is _Stage.INSIDE_START and (text := text.lstrip()):
            self._stage = _Stage.INSIDE
        text = self._padding.hold_back(text)
        if end >= 0:
            self._padding.take()
            self._stage = _Stage.ANSWER_START
        return text, answer


class ReasoningCounter:
    """Counts the tokens of the reasoning, tags included, from the bytes of tokens.

    The text is no help: it lags behind the tokens and lacks control tokens. In `tags`, a stand-in of `special` replaces
    a tag that is a special token. `between` is the text between two messages of an answer; any may be reasoning.
    """

    def __init__(
        self,
        tags: ReasoningTags,
        token_bytes: Callable[[int], bytes],
        special: SpecialTags = NO_SPECIAL_TAGS,
        *,
        is_open: bool,
        between: str = "",
    ) -> None:
        self.num_tokens = 0
        self._opening, self._closing = (tag.encode(errors="surrogatepass") for tag in tags)
        self._resumes = between.encode(errors="surrogatepass") + self._opening if between else None
        self._token_bytes = token_bytes
        self._stand_ins = {each: tag.encode(errors="surrogatepass") for each, tag in special.stand_ins_of_ids.items()}
        self._is_open = is_open
        self._is_over = False
        self._seen = b""  # before the opening: everything; in the reasoning: the end, where the closing tag may begin
        self._num_seen = 0  # tokens that may turn out to be reasoning

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._seen += self._stand_ins.get(token_id) or self._token_bytes(token_id)
            self._num_seen += 1
            if not self._is_open:
                start = self._seen.lstrip()
                if not start.startswith(self._opening):
                    self._is_over = not self._opening.startswith(start)
                    continue
                self._is_open, self._seen = True, start.removeprefix(self._opening)
            self.num_tokens += self._num_seen
            self._num_seen = 0
            self._is_over = self._closing in self._seen
            self._seen = self._seen[-len(self._closing) :]
            if self._is_over and self._resumes is not None:
                self._is_over = self._is_open = False
                self._opening, self._seen = self._resumes, b""
