"""Closes the reasoning of a request whose budget is used up: the tokens of the closing tag are all that may follow.

It takes the same way as a grammar, around one if there is one, and is gone when the reasoning is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.messages import Refusal
from engine.structured.matcher import TokenMatcher
from engine.structured.token_rules import ALL_TOKENS

MAX_EXCESS = 3  # bytes of a character behind its first one


class ThinkingBudget:
    """A `TokenMatcher` of one request, around what restricts it beside.

    `tags` are those around the reasoning; "" for the first says that the prompt has opened it. `closing` is the second
    in tokens, which come on top of the budget. All before them count, the opening tag included: together they are the
    `reasoning_tokens` of usage. A character that has been begun is ended first, which takes three tokens at most.
    """

    def __init__(
        self,
        budget: int,
        *,
        tags: tuple[str, str],
        closing: Sequence[int],
        token_bytes: Callable[[int], bytes],
        inner: TokenMatcher | None = None,
    ) -> None:
        self._budget = budget
        self._opening, self._closing = (tag.encode() for tag in tags)
        self._closing_ids = tuple(closing)
        self._token_bytes = token_bytes
        self._inner = inner
        self._is_open = not self._opening
        self._is_over = False
        self._seen = b""  # before the opening: everything; in the reasoning: what the closing tag may begin in
        self._num_tokens = 0
        self._num_forced = 0  # tokens of the closing tag that have come because nothing else might

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    @property
    def refusal(self) -> Refusal | None:
        return None if self._inner is None else self._inner.refusal

    @property
    def is_ready(self) -> bool:
        return self._inner is None or self._inner.is_ready

    @property
    def rest(self) -> TokenMatcher | None:
        return self._inner if self._is_over else self

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def accept(self, token_id: int) -> bool:
        if self._is_exhausted:
            self._num_forced += 1
        self._num_tokens += 1
        self._read(self._token_bytes(token_id))
        return self._inner is not None and self._inner.accept(token_id)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        if self._is_exhausted:
            token_id = self._closing_ids[self._num_forced]
            mask[:] = 0
            mask[token_id // 32] = np.uint32(1) << np.uint32(token_id % 32)
        elif self._inner is not None:
            self._inner.fill(mask)
        else:
            mask[:] = ALL_TOKENS

    @property
    def _is_exhausted(self) -> bool:
        excess = self._num_tokens - self._budget
        if excess < 0 or self._is_over or not self._is_open:
            return False
        return self._num_forced > 0 or excess >= MAX_EXCESS or not _ends_within_character(self._seen)

    def _read(self, text: bytes) -> None:
        self._seen += text
        if not self._is_open:
            start = self._seen.lstrip()
            if not start.startswith(self._opening):
                self._is_over = not self._opening.startswith(start)
                return
            self._is_open, self._seen = True, start.removeprefix(self._opening)
        # A tag that was forced is whole with its last token, whatever bytes that stands for.
        self._is_over = self._closing in self._seen or self._num_forced == len(self._closing_ids)
        self._seen = self._seen[-len(self._closing) :]


def _ends_within_character(text: bytes) -> bool:
    """Whether UTF-8 that ends so has to go on."""
    for behind, byte in enumerate(reversed(text[-MAX_EXCESS:]), 1):
        if byte & 0xC0 != 0x80:  # the first one of a character
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return length > behind
    return False
