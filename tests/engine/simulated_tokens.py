"""What a simulated model says. The next token is a function of the sequence alone, so `expected_output` tells what any
request must give, whatever it is batched with, however it is chunked, preempted or shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import FinishReason, SamplingParams

_MASK = 2**64 - 1
EMPTY = 0x9E3779B97F4A7C15  # the digest of no tokens


def extend_digest(digest: int, token_id: int) -> int:
    """The rolling digest of a sequence with one token more."""
    mixed = ((digest ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def digests_of(token_ids: Sequence[int]) -> list[int]:
    """The rolling digest after each of these tokens."""
    digests: list[int] = []
    for token_id in token_ids:
        digests.append(extend_digest(digests[-1] if digests else EMPTY, token_id))
    return digests


def next_token(
    digest: int, num_outputs: int, sampling: SamplingParams, stop_token_ids: Sequence[int], vocab_size: int
) -> int:
    """Fixed by the sequence, and by the seed unless greedy; stop tokens are masked until min_tokens."""
    seed = 0 if sampling.greedy else sampling.seed or 0
    token_id = (extend_digest(digest, seed) >> 7) % vocab_size
    if num_outputs < sampling.min_tokens:
        while token_id in stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


@dataclass(frozen=True)
class ExpectedOutput:
    """What a request must give."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def expected_output(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: Sequence[int] = (),
) -> ExpectedOutput:
    """Computed directly from the sequence, without blocks, batches or a scheduler."""
    eos = set() if sampling.ignore_eos else set(eos_token_ids)
    digest = digests_of(prompt)[-1]
    output: list[int] = []
    while True:
        token_id = next_token(digest, len(output), sampling, sorted(eos.union(sampling.stop_token_ids)), vocab_size)
        digest = extend_digest(digest, token_id)
        output.append(token_id)
        if len(output) >= sampling.min_tokens and token_id in eos:
            return ExpectedOutput(output, FinishReason.STOP, None)
        if len(output) >= sampling.min_tokens and token_id in sampling.stop_token_ids:
            return ExpectedOutput(output, FinishReason.STOP, token_id)
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return ExpectedOutput(output, FinishReason.LENGTH, None)
