"""What a client forbids token by token: everything but `allowed_token_ids`, and what would complete one of `bad_words`.

It takes the same way as a grammar: masks beside the step, the tokens read one by one. With a grammar both hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.messages import Refusal
from engine.structured.matcher import GrammarMatcher, TokenMatcher

ALL_TOKENS = np.uint32(0xFFFFFFFF)


class TokenRules:
    """A `TokenMatcher` of one request: a grammar's if there is one, narrowed.

    `allowed` is the mask of `allowed_token_ids` (see `mask_of`), or None; requests may share it.
    `bad_words` are sequences of token ids, none of them empty. A sequence of one token is never generated; of a longer
    one the last token is not, where the others have just been.
    """

    def __init__(
        self,
        *,
        allowed: NDArray[np.uint32] | None,
        bad_words: Sequence[Sequence[int]],
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self._grammar = grammar
        self._allowed = allowed
        self._bad_words = [(tuple(word[:-1]), word[-1]) for word in bad_words]
        self._left_nothing: Refusal | None = None
        self._names = [
            *(["allowed_token_ids"] if allowed is not None else []),
            *(["bad_words"] if bad_words else []),
        ]
        self._recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in bad_words), default=0))

    @property
    def error(self) -> str | None:
        if self._left_nothing is not None:
            return self._left_nothing.message
        return None if self._grammar is None else self._grammar.error

    @property
    def refusal(self) -> Refusal | None:
        if self._left_nothing is not None:
            return self._left_nothing
        return None if self._grammar is None else self._grammar.refusal

    def close(self) -> None:
        if self._grammar is not None:
            self._grammar.close()

    @property
    def is_ready(self) -> bool:
        return self._grammar is None or self._grammar.is_ready

    @property
    def rest(self) -> TokenMatcher | None:
        return self

    def accept(self, token_id: int) -> bool:
        if self._left_nothing is not None:
            return False
        self._recent.append(token_id)
        return self._grammar is not None and self._grammar.accept(token_id)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next. If none may, set `error`, and allow all for the sampler."""
        if self._grammar is None:
            mask[:] = ALL_TOKENS
        else:
            self._grammar.fill(mask)
        if self._allowed is not None:
            words = min(len(mask), len(self._allowed))
            mask[:words] &= self._allowed[:words]
            mask[words:] = 0
        recent = tuple(self._recent)
        for before, token_id in self._bad_words:
            if token_id // 32 < len(mask) and recent[len(recent) - len(before) :] == before:
                mask[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
        if not mask.any():
            names = [*self._names, *(["structured_output"] if self._grammar is not None else [])]
            self._left_nothing = Refusal(
                f"{' and '.join(names)} leave no token that may come next; allow more tokens or leave one of them out.",
                param=names[-1],
            )
            mask[:] = ALL_TOKENS


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, as it is at the start of a text and as it is behind a blank; vLLM's rule: the second
    only where it is as long as the first and begins with another token."""
    found: list[tuple[int, ...]] = []
    for word in words:
        first = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False).ids)
        second = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False).ids)
        found += [first] if first else []
        if second and len(second) == len(first) and second[0] != first[0]:
            found.append(second)
    return tuple(dict.fromkeys(found))


def mask_of(token_ids: Sequence[int]) -> NDArray[np.uint32]:
    """Return the mask that allows these tokens, at least one: a bit for each token, in words of 32 bits."""
    bits = np.zeros((max(token_ids) // 32 + 1) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
