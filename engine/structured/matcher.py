"""One request's place in its grammar.

Owned by the request and moved on by the scheduler, on the engine's thread. Masks are computed on the manager's threads.
The step that wants a mask waits for it before it samples, but a step that fails may leave one being computed behind.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.messages import GRAMMAR_TOO_COMPLEX, Refusal
from engine.structured.compiler import CompiledGrammar

# Processor time that the masks of one request may take: so much, and so much more for every token. Most masks take
# microseconds; a grammar made to take long would hold up all requests beside it.
SECONDS_AT_ONCE = 1.0
SECONDS_PER_TOKEN = 0.002

_NOT_ALLOWED = "doesn't satisfy the grammar"  # llguidance's words; every other end met one of its limits
_TOO_COMPLEX = Refusal(
    "structured_output became too complex to follow within the answer. Allow fewer alternatives at a time.",
    param="structured_output",
    code=GRAMMAR_TOO_COMPLEX,
)
_TOO_SLOW = Refusal(
    "structured_output takes too long to follow. Allow fewer alternatives at a time.",
    param="structured_output",
    code=GRAMMAR_TOO_COMPLEX,
)


class TokenMatcher(Protocol):
    """What the scheduler and the manager need of whatever says which tokens may follow."""

    @property
    def error(self) -> str | None:
        """Why the request cannot go on; None while it can."""
        ...

    @property
    def refusal(self) -> Refusal | None:
        """What the client is told of the `error`, if it is the client's."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether masks can be computed. False for ever if there is an `error`."""
        ...

    @property
    def rest(self) -> TokenMatcher | None:
        """What restricts the tokens from now on: itself, for as long as it does; None if nothing does."""
        ...

    def close(self) -> None:
        """The request is gone: what is not ready yet is not wanted any more."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by a sampled token. Returns whether the output is complete."""
        ...

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next."""
        ...


class GrammarMatcher:
    """Follows the tokens of one request through its grammar, which may still be being compiled at first.

    It survives a preemption: the tokens that were generated stay, and so does the place in the grammar. `error` says
    why the request cannot go on; None while it can; `refusal` is set too where its client can correct it.
    """

    def __init__(self, compiling: Future[CompiledGrammar]) -> None:
        self.error: str | None = None
        self.refusal: Refusal | None = None
        self._compiling = compiling
        self._matcher: LLMatcher | None = None
        self._lock = threading.Lock()  # of the matcher
        self._num_tokens = 0
        self._seconds = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled. False for ever if that failed; then there is an `error`."""
        if self._matcher is None and self.error is None and self._compiling.done():
            try:
                self._matcher = self._compiling.result().matcher()
            except InvalidRequest as error:
                self._refuse(Refusal.of(error))
            except Exception as error:
                self.error = f"the grammar could not be compiled ({type(error).__name__})"
        return self._matcher is not None

    @property
    def rest(self) -> TokenMatcher | None:
        return self

    def accept(self, token_id: int) -> bool:
        """Move on by a sampled token. Returns whether the output is complete: nothing may follow.

        Sets `error` if it cannot be followed: the grammar turned out to take too much work, or, which would be a fault
        of ours, the token was not allowed.
        """
        assert self._matcher is not None
        self._num_tokens += 1
        with self._lock:
            followed = not self._matcher.is_error() and self._matcher.consume_token(token_id)
        if not followed:
            # The compiler's own words cite tokens, and what a model wrote does not belong into logs.
            if _NOT_ALLOWED in self._matcher.get_error():
                self.error = "a token was sampled that the grammar does not allow"
            else:
                self._refuse(_TOO_COMPLEX)
            return False
        if self._seconds > SECONDS_AT_ONCE + SECONDS_PER_TOKEN * self._num_tokens:
            self._refuse(_TOO_SLOW)
            return False
        return self._matcher.is_stopped()

    def close(self) -> None:
        """Leave the compiler's queue."""
        self._compiling.cancel()

    def _refuse(self, refusal: Refusal) -> None:
        self.error, self.refusal = refusal.message, refusal

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next: bit `id % 32` of word `id // 32` is set for each of them.

        In an error nothing but the end is allowed, so that the next `accept` finds it.
        """
        assert self._matcher is not None
        with self._lock:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._seconds += time.thread_time() - started
