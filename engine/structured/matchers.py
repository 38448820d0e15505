"""A request's position in its grammar, token rules and the thinking budget.

A matcher belongs to a request. The scheduler advances it, on the engine's thread; the manager's threads compute its
masks. A step waits for its masks before it samples, but when a step fails, its masks may still be under computation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.messages import GRAMMAR_TOO_COMPLEX, Refusal
from engine.structured.compiler import CompiledGrammar

# The CPU time that the masks of one request may take: a fixed part, and a part per token. Most masks take microseconds;
# a slow grammar would delay all requests in the same steps.
SECONDS_AT_ONCE = 1.0
SECONDS_PER_TOKEN = 0.002

ALL_TOKENS = np.uint32(0xFFFFFFFF)
_NOT_ALLOWED = "doesn't satisfy the grammar"  # llguidance's message; all its other errors are about its limits
_TOO_COMPLEX = Refusal(
    "structured_output became too complex while the answer was generated. Allow fewer alternatives at a time.",
    param="structured_output",
    code=GRAMMAR_TOO_COMPLEX,
)
_TOO_SLOW = Refusal(
    "structured_output takes too much computing time. Allow fewer alternatives at a time.",
    param="structured_output",
    code=GRAMMAR_TOO_COMPLEX,
)


class TokenMatcher:
    """The tokens that may follow in the output of one request, for the scheduler and the manager.

    This base class allows all tokens that an `inner` matcher allows, if there is one.
    """

    def __init__(self, inner: TokenMatcher | None = None) -> None:
        self._inner = inner
        self._error: str | None = None
        self._refusal: Refusal | None = None

    @property
    def error(self) -> str | None:
        """The reason why the request cannot go on; None while it can."""
        return self._error if self._error is not None or self._inner is None else self._inner.error

    @property
    def refusal(self) -> Refusal | None:
        """The message for the client, if the client caused the `error`."""
        return self._refusal if self._error is not None or self._inner is None else self._inner.refusal

    @property
    def is_ready(self) -> bool:
        """True if masks can be computed. False forever if the grammar could not be compiled."""
        return self._inner is None or self._inner.is_ready

    @property
    def rest(self) -> TokenMatcher | None:
        """The matcher to use from now on: itself while it restricts tokens, then the one inside it, if any."""
        return self

    def close(self) -> None:
        """Cancel a compilation: the request has ended."""
        if self._inner is not None:
            self._inner.close()

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token. Return True if the output is complete, so that no token may follow."""
        return self._inner is not None and self._inner.accept(token_id)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next: bit `id % 32` of word `id // 32` is set for each of them."""
        if self._inner is None:
            mask[:] = ALL_TOKENS
        else:
            self._inner.fill(mask)

    def _refuse(self, refusal: Refusal) -> None:
        self._error, self._refusal = refusal.message, refusal


class GrammarMatcher(TokenMatcher):
    """Follows a grammar, which may still be being compiled at first.

    A preemption does not change it: the generated tokens stay, and so does the position in the grammar.
    """

    def __init__(self, compiling: Future[CompiledGrammar]) -> None:
        super().__init__()
        self._compiling = compiling
        self._matcher: LLMatcher | None = None
        self._lock = threading.Lock()  # of the matcher
        self._num_tokens = 0
        self._seconds = 0.0

    @property
    def is_ready(self) -> bool:
        if self._matcher is None and self._error is None and self._compiling.done():
            try:
                self._matcher = self._compiling.result().matcher()
            except InvalidRequest as error:
                self._refuse(Refusal.of(error))
            except Exception as error:
                self._error = f"the grammar could not be compiled ({type(error).__name__})"
        return self._matcher is not None

    def accept(self, token_id: int) -> bool:
        """Advance. Set `error` if the grammar takes too much computing time, or if the token is not allowed (a bug of
        Headrace)."""
        assert self._matcher is not None
        self._num_tokens += 1
        with self._lock:
            followed = not self._matcher.is_error() and self._matcher.consume_token(token_id)
        if not followed:
            # llguidance's message contains tokens, but a model's output must not be logged.
            if _NOT_ALLOWED in self._matcher.get_error():
                self._error = "a token was sampled that the grammar does not allow"
            else:
                self._refuse(_TOO_COMPLEX)
            return False
        if self._seconds > SECONDS_AT_ONCE + SECONDS_PER_TOKEN * self._num_tokens:
            self._refuse(_TOO_SLOW)
            return False
        return self._matcher.is_stopped()

    def close(self) -> None:
        self._compiling.cancel()

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask. After an error only the end of output is allowed; the next `accept` sets `error`."""
        assert self._matcher is not None
        with self._lock:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._seconds += time.thread_time() - started


# ---------------------------------------------------------------------------------------------------------- token rules
# The restrictions by `allowed_token_ids` and `bad_words`. They use masks like a grammar; with a grammar both hold.


class TokenRules(TokenMatcher):
    """Follows token rules, and the grammar of the request if there is one.

    `allowed` is the mask of `allowed_token_ids` (see `mask_of`), or None; requests may share it. `bad_words` are
    sequences of token ids, none of them empty. The last token of a sequence is never generated directly after its other
    tokens.
    """

    def __init__(
        self,
        *,
        allowed: NDArray[np.uint32] | None,
        bad_words: Sequence[Sequence[int]],
        grammar: GrammarMatcher | None = None,
    ) -> None:
        super().__init__(grammar)
        self._allowed = allowed
        self._bad_words = [(tuple(word[:-1]), word[-1]) for word in bad_words]
        self._names = [*(["allowed_token_ids"] if allowed is not None else []), *(["bad_words"] if bad_words else [])]
        self._recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in bad_words), default=0))

    def accept(self, token_id: int) -> bool:
        self._recent.append(token_id)
        return self._error is None and super().accept(token_id)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask. If it would allow no token, set `error`, and allow all tokens for the sampler."""
        super().fill(mask)
        if self._allowed is not None:
            words = min(len(mask), len(self._allowed))
            mask[:words] &= self._allowed[:words]
            mask[words:] = 0
        recent = tuple(self._recent)
        for before, token_id in self._bad_words:
            if token_id // 32 < len(mask) and recent[len(recent) - len(before) :] == before:
                mask[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
        if not mask.any():
            names = [*self._names, *(["structured_output"] if self._inner is not None else [])]
            reason = "together allow no next token. Allow more tokens or leave one of these fields out."
            self._refuse(Refusal(f"{' and '.join(names)} {reason}", param=names[-1]))
            mask[:] = ALL_TOKENS


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and after a blank. By vLLM's rule, the second form
    counts only if it is as long as the first and begins with another token."""
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


# ------------------------------------------------------------------------------------------------------ thinking budget
# When the budget is used up, only the tokens of the closing tag may follow. After the reasoning only the inner matcher
# remains.


MAX_EXCESS = 3  # bytes of a UTF-8 character after its first


class ThinkingBudget(TokenMatcher):
    """Ends the reasoning at a budget. The `inner` matcher is the request's other one, if any.

    `tags` are the tags around the reasoning; an empty first tag means that the prompt has opened it. `closing` has the
    tokens of the second tag, which do not count for the budget. All tokens before them count, the opening tag included:
    they are the `reasoning_tokens` of usage. When the budget ends within a character, the character is completed first,
    in at most three tokens.
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
        super().__init__(inner)
        self._budget = budget
        self._opening, self._closing = (tag.encode() for tag in tags)
        self._closing_ids = tuple(closing)
        self._token_bytes = token_bytes
        self._is_open = not self._opening
        self._is_over = False
        self._seen = b""  # all bytes before the opening tag; in the reasoning, those that may begin the closing tag
        self._num_tokens = 0
        self._num_forced = 0  # tokens of the closing tag that were forced

    @property
    def rest(self) -> TokenMatcher | None:
        return self._inner if self._is_over else self

    def accept(self, token_id: int) -> bool:
        if self._is_exhausted:
            self._num_forced += 1
        self._num_tokens += 1
        self._read(self._token_bytes(token_id))
        return super().accept(token_id)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        if self._is_exhausted:
            token_id = self._closing_ids[self._num_forced]
            mask[:] = 0
            mask[token_id // 32] = np.uint32(1) << np.uint32(token_id % 32)
        else:
            super().fill(mask)

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
        # A forced tag is complete after its last token, even if the tokens' bytes differ from the tag.
        self._is_over = self._closing in self._seen or self._num_forced == len(self._closing_ids)
        self._seen = self._seen[-len(self._closing) :]


def _ends_within_character(text: bytes) -> bool:
    """Return True if UTF-8 bytes end within a character."""
    for behind, byte in enumerate(reversed(text[-MAX_EXCESS:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return length > behind
    return False
