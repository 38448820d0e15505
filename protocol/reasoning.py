"""Reasoning: what a model thinks between two tags before it answers, taken out of its text.

Two families of tags are known (`THINK`: Qwen 3, DeepSeek R1 and most others; `BRACKETS`: Magistral). The opening tag
counts only where the text begins, so an answer may speak of tags; many templates have opened the reasoning already in
the prompt, and then the text begins within it. White space around the tags is padding and belongs to neither side.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocol.tags import NO_SPECIAL_TAGS, Padding, SpecialTags, unfinished_tag


class ReasoningTags(NamedTuple):
    """What opens and closes the reasoning."""

    opening: str
    closing: str


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")


class _Stage(enum.Enum):
    BEFORE = enum.auto()  # nothing but white space and perhaps a part of the opening tag
    INSIDE_START = enum.auto()  # in the reasoning, of which nothing but white space has come
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
        """What `text` adds to the reasoning and to the answer."""
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
        """What was held back, now that the text has ended."""
        held, self._held = self._held, ""
        if self._stage is _Stage.INSIDE:
            return self._padding.take() + held, ""
        return (held.lstrip(), "") if self._stage is _Stage.INSIDE_START else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        """The reasoning in `text`, and what comes after its end."""
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
    """Counts the tokens of the reasoning, tags included, from the bytes that tokens stand for.

    Text cannot tell: it trails the tokens, and control tokens are not in it. In `tags`, the stand-in of
    `special` replaces a tag that is a special token.
    """

    def __init__(
        self,
        tags: ReasoningTags,
        token_bytes: Callable[[int], bytes],
        special: SpecialTags = NO_SPECIAL_TAGS,
        *,
        is_open: bool,
    ) -> None:
        self.num_tokens = 0
        self._opening, self._closing = (tag.encode(errors="surrogatepass") for tag in tags)
        self._token_bytes = token_bytes
        self._stand_ins = {each: tag.encode(errors="surrogatepass") for each, tag in special.stand_ins_of_ids.items()}
        self._is_open = is_open
        self._is_over = False
        self._seen = b""  # before the opening: everything; in the reasoning: what the closing tag may begin in
        self._num_seen = 0  # tokens before the reasoning is known to be one

    def count(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the choice."""
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
