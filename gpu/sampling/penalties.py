"""Repetition, presence and frequency penalties over the tokens a request has seen.

The input batch keeps `Penalized`: the `SeenTokens` of each request that asks for a penalty, and of no other. The
sampler applies the sparse table that they make together; cost and memory follow the number of distinct tokens seen, not
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.columns import Column, parameter

PENALTIES = tuple(
    parameter(name, np.float32) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
)
IS_PENALIZED = Column("is_penalized", np.bool_, False, lambda request: request.sampling.has_penalties, host_only=True)


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

    def of_tokens(self, first: int, last: int) -> Penalties:
        """What of it concerns these tokens, counted from the first of them."""
        here = (self.token_ids >= first) & (self.token_ids < last)
        kept = Penalties(**{name: values[here] for name, values in vars(self).items()})
        kept.token_ids[:] -= first
        return kept


class Penalized:
    """The rows whose `columns` say that they are penalized, and what each of them has seen."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._is_penalized = columns[IS_PENALIZED.name]
        self._penalties = [columns[column.name] for column in PENALTIES]
        self._seen: dict[int, SeenTokens] = {}

    def add(self, row: int, request: NewRequestData) -> None:
        """Take over the tokens of a request whose columns are filled. One that is resumed comes with those that it
        generated before."""
        if self._is_penalized[row]:
            self._seen[row] = SeenTokens(np.array(request.token_ids, dtype=np.int32), request.num_prompt_tokens)

    def remove(self, row: int) -> None:
        self._seen.pop(row, None)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Count the tokens that these rows have just generated."""
        for i in np.flatnonzero(self._is_penalized[rows]).tolist():
            self._seen[int(rows[i])].append(int(token_ids[i]))

    def select(self, rows: NDArray[np.int64]) -> Penalties | None:
        """The penalties of logits that are sampled with the parameters of these rows."""
        indices = np.flatnonzero(self._is_penalized[rows])
        if len(indices) == 0:
            return None
        penalized = rows[indices]
        seen = [self._seen[row] for row in penalized.tolist()]
        repeats = [len(s.token_ids) for s in seen]
        repetition, presence, frequency = (np.repeat(column[penalized], repeats) for column in self._penalties)
        return Penalties(
            rows=np.repeat(indices, repeats),
            token_ids=np.concatenate([s.token_ids for s in seen]),
            output_counts=np.concatenate([s.output_counts for s in seen]).astype(np.float32),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )


def apply_penalties(logits: NDArray[np.float32], penalties: Penalties) -> None:
    """Change `logits` ([S, vocab]) in place.

    Repetition divides the positive and multiplies the negative logits of every token in prompt or output (Keskar et
    al., CTRL, 2019, and Hugging Face's processor of that name). Presence and frequency, then, are OpenAI's: over the
    output alone, `logit -= frequency * count + presence * (count > 0)`.
    """
    seen, counts = logits[penalties.rows, penalties.token_ids], penalties.output_counts
    seen = np.where(seen > 0, seen / penalties.repetition, seen * penalties.repetition)
    seen -= penalties.frequency * counts + penalties.presence * (counts > 0)
    logits[penalties.rows, penalties.token_ids] = seen
