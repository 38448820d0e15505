"""Repetition, presence and frequency penalties over the tokens a request has seen.

`SamplingState` keeps a `SeenTokens` for each request that asks for a penalty, and for no other; the sampler applies
the sparse table that they make together. Cost and memory follow the number of distinct tokens seen, not the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


class SeenTokens:
    """The distinct tokens of one request's prompt and output, and how often each stands in the output."""

    def __init__(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        distinct = np.unique(token_ids)
        # Grown by doubling: most requests end long before their limit.
        self._token_ids = np.zeros(max(256, 2 * len(distinct)), dtype=np.int64)
        self._output_counts = np.zeros(len(self._token_ids), dtype=np.int32)
        self._token_ids[: len(distinct)] = distinct
        self._index = {token_id: i for i, token_id in enumerate(distinct.tolist())}
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self._output_counts[self._index[token_id]] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """int64 [U], in order of first appearance for what was generated."""
        return self._token_ids[: len(self._index)]

    @property
    def output_counts(self) -> NDArray[np.int32]:
        """int32 [U], 0 for tokens that only the prompt holds."""
        return self._output_counts[: len(self._index)]

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        i = self._index.setdefault(token_id, len(self._index))
        if i == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
        self._token_ids[i] = token_id
        self._output_counts[i] += 1


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """One entry per (row, seen token) of the rows that use penalties; all arrays are [N]."""

    rows: NDArray[np.int64]  # into the logits
    token_ids: NDArray[np.int64]
    output_counts: NDArray[np.float32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Change `logits` (float32 [S, vocab]) in place.

    Repetition divides the positive and multiplies the negative logits of every token in prompt or output (Keskar et
    al., CTRL, 2019, and Hugging Face's processor of that name). Presence and frequency, then, are OpenAI's: over the
    output alone, `logit -= frequency * count + presence * (count > 0)`.
    """

    def on_device(array: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    where = (on_device(penalties.rows), on_device(penalties.token_ids))
    repetition, counts = on_device(penalties.repetition), on_device(penalties.output_counts)
    seen = logits[where]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= on_device(penalties.frequency) * counts + on_device(penalties.presence) * (counts > 0)
    logits[where] = seen
