"""The decoding knobs of every request in the batch, as columns over its stable rows.

Owned by the input batch, which calls `add`, `remove` and `append`; the model runner calls `select` for the rows that
sample. Columns cost nothing per step; the sparse features (logit bias, min_tokens, penalties) live in dictionaries of
the rows that use them, and only those rows are ever looped over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData
from gpu.sampling.masks import LogitsMask
from gpu.sampling.penalties import Penalties, SeenTokens

# Below this a temperature is indistinguishable from greedy, but dividing by it could leave float32's range.
_MIN_TEMPERATURE = 1e-5
_UINT64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SparseBias:
    """Amounts to add to single logits; all arrays are [N]. A token that is forbidden has -inf."""

    rows: NDArray[np.int64]  # into the logits
    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SamplingMetadata:
    """How to sample one step's rows: all arrays are [S], on the host, parallel to the logits."""

    temperature: NDArray[np.float32]  # 0 is greedy
    top_k: NDArray[np.int64]  # 0 is off
    top_p: NDArray[np.float64]  # 1 is off
    min_p: NDArray[np.float64]  # 0 is off
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]  # of the token to be drawn, counted from the start of the prompt
    num_logprobs: NDArray[np.int64]  # -1 is none, 0 the drawn token's only
    mask: LogitsMask | None = None  # of the requests' grammars
    bias: SparseBias | None = None
    penalties: Penalties | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest logit of each row is all that matters."""
        return (
            self.mask is None
            and self.bias is None
            and self.penalties is None
            and not self.temperature.any()
            and bool((self.num_logprobs < 0).all())
        )

    def drawing(self, indices: NDArray[np.int64]) -> SamplingMetadata:
        """What the draw itself needs, for some of the rows: mask, bias, penalties and logprobs are left behind."""
        return replace(
            self,
            temperature=self.temperature[indices],
            top_k=self.top_k[indices],
            top_p=self.top_p[indices],
            min_p=self.min_p[indices],
            seed=self.seed[indices],
            position=self.position[indices],
            num_logprobs=self.num_logprobs[indices],
            mask=None,
            bias=None,
            penalties=None,
        )


class SamplingState:
    """Columns [max_num_seqs]; a row is meaningful between `add` and `remove`."""

    def __init__(self, max_num_seqs: int) -> None:
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        # Stop tokens are forbidden while a row has fewer tokens than this, its prompt included.
        self._may_stop_at = np.zeros(max_num_seqs, dtype=np.int64)
        self._biased = np.zeros(max_num_seqs, dtype=bool)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stop_token_ids: dict[int, NDArray[np.int64]] = {}
        self._penalized = np.zeros(max_num_seqs, dtype=bool)
        self._seen: dict[int, SeenTokens] = {}

    def add(self, row: int, request: NewRequestData) -> None:
        """Take over a request's parameters. A resumed request comes with the tokens it generated before."""
        params = request.sampling
        if params.seed is None:
            raise ValueError(f"Request {request.request_id} has no seed: the engine draws one before it plans.")
        # With one token left to choose from there is nothing to draw: top_k 1 is greedy, also where logits tie.
        greedy = params.greedy or params.top_k == 1
        self._temperature[row] = 0.0 if greedy else max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._seed[row] = params.seed & _UINT64
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

        self._may_stop_at[row] = 0
        if params.min_tokens > 0 and request.stop_token_ids:
            self._may_stop_at[row] = request.num_prompt_tokens + params.min_tokens
            self._stop_token_ids[row] = np.unique(np.array(request.stop_token_ids, dtype=np.int64))
        self._biased[row] = bool(params.logit_bias)
        if params.logit_bias:
            self._bias[row] = (
                np.fromiter(params.logit_bias.keys(), dtype=np.int64),
                np.fromiter(params.logit_bias.values(), dtype=np.float32),
            )
        self._penalized[row] = params.has_penalties
        if params.has_penalties:
            self._seen[row] = SeenTokens(np.array(request.token_ids, dtype=np.int32), request.num_prompt_tokens)

    def remove(self, row: int) -> None:
        """Let go of what a row held beyond its columns."""
        self._bias.pop(row, None)
        self._stop_token_ids.pop(row, None)
        self._seen.pop(row, None)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Count the tokens that these rows have just generated."""
        for i in np.flatnonzero(self._penalized[rows]).tolist():
            self._seen[int(rows[i])].append(int(token_ids[i]))

    def select(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> SamplingMetadata:
        """The metadata of rows that sample, given how many tokens each holds. It shares no memory with the state."""
        return SamplingMetadata(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            position=num_tokens.astype(np.int64),
            num_logprobs=self._num_logprobs[rows],
            bias=self.select_bias(rows, num_tokens),
            penalties=self._select_penalties(rows),
        )

    def columns(self, row: int) -> dict[str, float]:
        """The parameters of one row that are a number each, for who keeps them elsewhere."""
        return {
            "temperature": float(self._temperature[row]),
            "top_k": int(self._top_k[row]),
            "top_p": float(self._top_p[row]),
            "min_p": float(self._min_p[row]),
            "seed": int(self._seed[row]),
        }

    def select_bias(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> SparseBias | None:
        """What is added to the logits of rows that sample, given how many tokens each holds."""
        parts = [(i, *self._bias[int(rows[i])]) for i in np.flatnonzero(self._biased[rows]).tolist()]
        for i in np.flatnonzero(num_tokens < self._may_stop_at[rows]).tolist():
            stops = self._stop_token_ids[int(rows[i])]
            parts.append((i, stops, np.full(len(stops), -np.inf, dtype=np.float32)))
        if not parts:
            return None
        indices, token_ids, values = zip(*parts, strict=True)
        return SparseBias(
            rows=np.repeat(np.array(indices, dtype=np.int64), [len(ids) for ids in token_ids]),
            token_ids=np.concatenate(token_ids),
            values=np.concatenate(values),
        )

    def _select_penalties(self, rows: NDArray[np.int64]) -> Penalties | None:
        indices = np.flatnonzero(self._penalized[rows])
        if len(indices) == 0:
            return None
        penalized = rows[indices]
        seen = [self._seen[row] for row in penalized.tolist()]
        repeats = [len(s.token_ids) for s in seen]
        return Penalties(
            rows=np.repeat(indices, repeats),
            token_ids=np.concatenate([s.token_ids for s in seen]),
            output_counts=np.concatenate([s.output_counts for s in seen]).astype(np.float32),
            repetition=np.repeat(self._repetition[penalized], repeats),
            presence=np.repeat(self._presence[penalized], repeats),
            frequency=np.repeat(self._frequency[penalized], repeats),
        )
