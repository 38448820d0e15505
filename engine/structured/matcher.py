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
from engine.structured.compiler import CompiledGrammar

# Processor time that the masks of one request may take: so much, and so much more for every token. Most masks take
# microseconds; a grammar made to take long would hold up all requests beside it.
SECONDS_AT_ONCE = 1.0
SECONDS_PER_TOKEN = 0.002


class TokenMatcher(Protocol):
    """What the scheduler and the manager need of whatever says which tokens may follow."""

    @property
    def error(self) -> str | None:
        """Why the request cannot go on; None while it can."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether masks can be computed. False for ever if there is an `error`."""
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
    why the request cannot go on; None while it can.
    """

    def __init__(self, compiling: Future[CompiledGrammar]) -> None:
        self.error: str | None = None
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
                self.error = str(error)
            except Exception as error:
                self.error = f"the grammar could not be compiled ({type(error).__name__})"
        return self._matcher is not None

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
            self.error = "the grammar has become too complex to follow"
            return False
        if self._seconds > SECONDS_AT_ONCE + SECONDS_PER_TOKEN * self._num_tokens:
            self.error = "the grammar takes too long to follow"
            return False
        return self._matcher.is_stopped()

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next: bit `id % 32` of word `id // 32` is set for each of them.

        In an error nothing but the end is allowed, so that the next `accept` finds it.
        """
        assert self._matcher is not None
        with self._lock:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._seconds += time.thread_time() - started
