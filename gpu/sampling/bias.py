"""What is added to single logits: a request's logit_bias, and -1e9 to its stop tokens until min_tokens are there.

Not -inf, because a mask (a grammar, the end of a thinking budget) may allow nothing else: then one of them comes.

The row table keeps one `Biases` for all its rows; only rows that use either are ever looped over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.columns import Column

_POSTPONED = -1e9  # far below all others, whatever penalties and temperature make of them


def _may_stop_at(request: NewRequestData) -> int:
    if request.sampling.min_tokens > 0 and request.stop_token_ids:
        return request.num_prompt_tokens + request.sampling.min_tokens
    return 0


BIAS = (
    Column("is_biased", np.bool_, False, lambda request: bool(request.sampling.logit_bias), host_only=True),
    # Stop tokens are not to come at positions below this.
    Column("may_stop_at", np.int64, 0, _may_stop_at, host_only=True),
)


@dataclass(frozen=True, kw_only=True)
class SparseBias:
    """Amounts to add to single logits; all arrays are [N]."""

    rows: NDArray[np.int64]  # into the logits
    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]

    def of_tokens(self, first: int, last: int) -> SparseBias:
        """What of it concerns these tokens, counted from the first of them."""
        here = (self.token_ids >= first) & (self.token_ids < last)
        kept = SparseBias(**{name: values[here] for name, values in vars(self).items()})
        kept.token_ids[:] -= first
        return kept


class Biases:
    """Of the rows whose `columns` say that they have any."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._is_biased, self._may_stop_at = (columns[column.name] for column in BIAS)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stop_token_ids: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, request: NewRequestData) -> None:
        """Take over the tokens of a request whose columns are filled."""
        if self._may_stop_at[row]:
            self._stop_token_ids[row] = np.unique(np.array(request.stop_token_ids, dtype=np.int64))
        if bias := request.sampling.logit_bias:
            self._bias[row] = np.fromiter(bias.keys(), dtype=np.int64), np.fromiter(bias.values(), dtype=np.float32)

    def remove(self, row: int) -> None:
        self._bias.pop(row, None)
        self._stop_token_ids.pop(row, None)

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SparseBias | None:
        """What is added to the logits of these rows, given where the tokens to be sampled will stand: [S] both."""
        parts = [(i, *self._bias[int(rows[i])]) for i in np.flatnonzero(self._is_biased[rows]).tolist()]
        for i in np.flatnonzero(positions < self._may_stop_at[rows]).tolist():
            stops = self._stop_token_ids[int(rows[i])]
            parts.append((i, stops, np.full(len(stops), _POSTPONED, dtype=np.float32)))
        if not parts:
            return None
        indices, token_ids, values = zip(*parts, strict=True)
        return SparseBias(
            rows=np.repeat(np.array(indices, dtype=np.int64), [len(ids) for ids in token_ids]),
            token_ids=np.concatenate(token_ids),
            values=np.concatenate(values),
        )
