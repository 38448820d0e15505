"""The grammars of running requests. They are compiled while steps run; masks are computed while the device works.

Owned by the EngineCore. Methods are called on the engine's thread; the work is done on threads of this module and of
the compiler, where llguidance releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from engine.messages import EngineCoreRequest
from engine.plan import SchedulerOutput, TokenMasks
from engine.structured.compile_queue import Owner
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.structured.matchers import GrammarMatcher, ThinkingBudget, TokenMatcher, TokenRules, mask_of

MASK_THREADS = 4
# Handing a task to a thread costs about as much as computing eight masks.
MASKS_PER_TASK = 8
# The time for which an engine without other work waits for a compilation before it reads its inbox again.
WAIT_SECONDS = 0.005


class StructuredOutputManager:
    """Compiles grammars and computes masks. If the front end shares `compiler`, grammars are compiled already."""

    def __init__(
        self, compiler: GrammarCompiler, matchers_of: Callable[[SchedulerOutput], Sequence[tuple[int, TokenMatcher]]]
    ) -> None:
        """Use `matchers_of`, which returns the matchers of a plan with the indices of their requests in it."""
        self._compiler = compiler
        self._matchers_of = matchers_of
        self._allowed: tuple[tuple[int, ...], NDArray[np.uint32]] = (), np.empty(0, np.uint32)  # of the latest request
        self._compiling: set[Future[CompiledGrammar]] = set()
        self._fillers = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="token-masks")
        self._fillers.submit(compiler.build_tokenizer)  # early, so that no request waits for it

    def on_add(self, request: EngineCoreRequest) -> TokenMatcher | None:
        """Return the matcher of a new request; None if it needs none. Masks need its grammar compiled."""
        sampling = request.sampling
        grammar = None if sampling.structured_output is None else self._start_grammar(request)
        matcher: TokenMatcher | None = grammar
        if sampling.allowed_token_ids is not None or sampling.bad_words_token_ids:
            allowed = None if sampling.allowed_token_ids is None else self._mask_of(sampling.allowed_token_ids)
            matcher = TokenRules(allowed=allowed, bad_words=sampling.bad_words_token_ids, grammar=grammar)
        if sampling.closes_reasoning:
            assert sampling.thinking_token_budget is not None
            assert sampling.reasoning_tags is not None
            matcher = ThinkingBudget(
                sampling.thinking_token_budget,
                tags=sampling.reasoning_tags,
                closing=sampling.reasoning_end_token_ids,
                token_bytes=self._compiler.vocabulary.token_bytes,
                inner=matcher,
            )
        return matcher

    def _mask_of(self, token_ids: tuple[int, ...]) -> NDArray[np.uint32]:
        """Return the mask that allows these tokens. The choices of a request arrive one after another and share it."""
        if self._allowed[0] != token_ids:
            self._allowed = token_ids, mask_of(token_ids)
        return self._allowed[1]

    def _start_grammar(self, request: EngineCoreRequest) -> GrammarMatcher:
        assert request.sampling.structured_output is not None
        future = self._compiler.submit(request.sampling.structured_output, Owner.of(request))
        if not future.done():
            self._compiling = {other for other in self._compiling if not other.done()} | {future}
        return GrammarMatcher(future)

    def wait(self) -> None:
        """Wait a moment for a grammar that is being compiled; return at once if there is none."""
        if self._compiling:
            _, self._compiling = wait(self._compiling, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)

    def before_submit(self, plan: SchedulerOutput) -> None:
        """Begin to compute the plan's masks, if any of its requests needs one."""
        matchers = self._matchers_of(plan)
        if not matchers:
            return
        bits = np.empty((len(matchers), self._compiler.mask_words_of_tokenizer), dtype=np.uint32)
        indices = np.fromiter((index for index, _ in matchers), dtype=np.int64, count=len(matchers))
        tasks = [
            self._fillers.submit(_fill, matchers[start : start + MASKS_PER_TASK], bits[start : start + MASKS_PER_TASK])
            for start in range(0, len(matchers), MASKS_PER_TASK)
        ]
        plan.masks = PendingMasks(TokenMasks(indices=indices, bits=bits[:, : self._compiler.mask_words]), tasks)

    def close(self, is_healthy: bool) -> None:
        """Cancel compilations and masks that have not begun."""
        for future in self._compiling:
            future.cancel()
        self._fillers.shutdown(wait=False, cancel_futures=True)


class PendingMasks:
    """The masks of one plan while they are computed. An `engine.plan.MasksHandle`."""

    def __init__(self, masks: TokenMasks, tasks: Sequence[Future[None]]) -> None:
        self._masks = masks
        self._tasks = tasks

    def result(self) -> TokenMasks:
        """Wait for all masks, and return them."""
        for task in self._tasks:
            task.result()
        return self._masks


def _fill(matchers: Sequence[tuple[int, TokenMatcher]], bits: NDArray[np.uint32]) -> None:
    for (_, matcher), row in zip(matchers, bits, strict=True):
        matcher.fill(row)
