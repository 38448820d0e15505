"""The last check before the engine: a request that passes can run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.errors import InvalidRequest, PromptTooLong
from engine.messages import EngineCoreRequest, SamplingParams
from engine.structured.matchers import bad_word_token_ids

# Approximate microseconds, for `InputProcessor.cost`.
_PER_CHOICE = 8
_PER_BAD_WORD = 40
_PER_BAD_WORD_CHARACTER = 2
_TOKENS_PER_MICROSECOND = 32


class InputProcessor:
    """Checks requests against the engine's limits, and makes n requests of one with n > 1. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, seed: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    @staticmethod
    def cost(requests: Sequence[EngineCoreRequest]) -> int:
        cost = 0
        for sampling in _distinct(requests):
            cost += _PER_BAD_WORD * len(sampling.bad_words)
            cost += _PER_BAD_WORD_CHARACTER * sum(map(len, sampling.bad_words))
        for request in requests:
            cost += _PER_CHOICE * request.sampling.n + len(request.prompt_token_ids) // _TOKENS_PER_MICROSECOND
        return cost

    def process(self, requests: Sequence[EngineCoreRequest]) -> list[list[EngineCoreRequest]]:
        """Return the requests that the core will run for each of these: one per choice, each with its own seed and
        token limit. Sampling parameters that requests share are checked once.

        Request ids of the core are never used twice, even if clients repeat theirs: late outputs of an aborted request
        must not reach a later request.

        Raises InvalidRequest naming the field, its value and the limit.
        """
        checked = {id(sampling): self._checked(sampling) for sampling in _distinct(requests)}
        return [self._choices(request, checked[id(request.sampling)]) for request in requests]

    def _checked(self, sampling: SamplingParams) -> SamplingParams:
        """Check the parameters, and add the token ids of `bad_words` and of the closing reasoning tag."""
        sampling.check(self.vocab_size)
        token_ids: dict[str, tuple[Any, ...]] = {}
        if sampling.thinking_token_budget is not None and sampling.reasoning_tags is not None:
            closing = self._tokenizer.encode(sampling.reasoning_tags[1], add_special_tokens=False)
            token_ids["reasoning_end_token_ids"] = tuple(closing.ids)
        if sampling.bad_words:
            token_ids["bad_words_token_ids"] = bad_word_token_ids(self._tokenizer, sampling.bad_words)
        return msgspec.structs.replace(sampling, **token_ids) if token_ids else sampling

    def _choices(self, request: EngineCoreRequest, sampling: SamplingParams) -> list[EngineCoreRequest]:
        max_tokens = self._max_tokens(len(request.prompt_token_ids), sampling.max_tokens)
        self._check_prompt(request.prompt_token_ids)
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        return [
            msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}-{next(self._numbers)}",
                sampling=msgspec.structs.replace(sampling, n=1, max_tokens=max_tokens, seed=(seed + index) % 2**63),
            )
            for index in range(sampling.n)
        ]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token.", param="prompt")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"Token id {token_id} in the prompt is not in the vocabulary, 0 to {self.vocab_size - 1}.",
                    param="prompt",
                )

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the limit of output tokens, reduced to the context: many clients ask for more than fits."""
        room = self.max_model_len - num_prompt_tokens
        if room < (max_tokens != 0):
            raise PromptTooLong(num_prompt_tokens, self.max_model_len, param="prompt", needs_answer=max_tokens != 0)
        return room if max_tokens is None else min(max_tokens, room)


def _distinct(requests: Sequence[EngineCoreRequest]) -> list[SamplingParams]:
    """Return each sampling object of these requests once; most requests share one."""
    return list({id(request.sampling): request.sampling for request in requests}.values())
