"""The columns of the row table that sampling declares, and the filters.

A column is one number of every request. `gpu.runner.rows` keeps all columns on the host, `gpu.device.tables` keeps them
on a device, and samplers, kernels and the C++ library take them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages import ALL_LOGPROBS, SamplingParams
from engine.plan import NewRequestData


@dataclass(frozen=True)
class Column:
    """One number of every request. `default` is the number of a row without a request, with every feature off."""

    name: str
    dtype: type[np.generic]  # on the host
    default: float
    fill: Callable[[NewRequestData], float]
    host_only: bool = False

    @property
    def device_dtype(self) -> type[np.generic]:
        """The type on a device: 32 bits, except for a seed, which has 64 bits, read as a signed number."""
        if self.dtype is np.uint64:
            return np.int64
        return np.float32 if issubclass(self.dtype, np.floating) else np.int32


def parameter(name: str, dtype: type[np.generic]) -> Column:
    """Return the column of a number in `SamplingParams`, unchanged."""
    return Column(name, dtype, getattr(SamplingParams(), name), attrgetter(f"sampling.{name}"))


def make_columns(columns: Iterable[Column], num_rows: int) -> dict[str, NDArray[Any]]:
    """Return arrays of defaults by name, [num_rows] each."""
    return {column.name: np.full(num_rows, column.default, dtype=column.dtype) for column in columns}


# Below this a temperature is indistinguishable from greedy, but dividing by it could leave float32's range.
_MIN_TEMPERATURE = 1e-5


def _temperature(request: NewRequestData) -> float:
    params = request.sampling
    # A single candidate needs no draw: top_k 1 is greedy, also where logits tie.
    return 0.0 if params.greedy or params.top_k == 1 else max(params.temperature, _MIN_TEMPERATURE)


TEMPERATURE = Column("temperature", np.float32, 0.0, _temperature)  # 0 is greedy

FILTERS = (parameter("top_k", np.int64), parameter("top_p", np.float64), parameter("min_p", np.float64))


def _seed(request: NewRequestData) -> int:
    if request.sampling.seed is None:
        raise ValueError(f"Request {request.request_id} has no seed: the engine draws one before it plans.")
    return request.sampling.seed & 2**64 - 1


SEED = Column("seed", np.uint64, 0, _seed)

PENALTIES = tuple(
    parameter(name, np.float32) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
)

IS_PENALIZED = Column("is_penalized", np.bool_, False, lambda request: request.sampling.has_penalties, host_only=True)


def _may_stop_at(request: NewRequestData) -> int:
    if request.sampling.min_tokens > 0 and request.stop_token_ids:
        return request.num_prompt_tokens + request.sampling.min_tokens
    return 0


BIAS = (
    Column("is_biased", np.bool_, False, lambda request: bool(request.sampling.logit_bias), host_only=True),
    # Stop tokens are postponed at positions below this.
    Column("may_stop_at", np.int64, 0, _may_stop_at, host_only=True),
)


EVERY = 2**31 - 1  # instead of a number: those of all tokens are computed, though few may be returned


def how_many(asked: int | None) -> int:
    """Return a requested number of log-probabilities as a column's value; -1 means none."""
    return -1 if asked is None else EVERY if asked == ALL_LOGPROBS else asked


def _num_logprobs(request: NewRequestData) -> int:
    sampling = request.sampling
    return EVERY if sampling.logprob_token_ids else how_many(sampling.logprobs)


# -1 is none, 0 that of the sampled token alone.
NUM_LOGPROBS = Column("num_logprobs", np.int64, -1, _num_logprobs, host_only=True)


# True if a row's log-probabilities are those of the tokens that its grammar allows. Without a grammar they are those of
# all tokens: `allowed_token_ids` and `bad_words` do not change the model's distribution.
OF_GRAMMAR = Column(
    "of_grammar", np.bool_, False, lambda request: request.sampling.structured_output is not None, host_only=True
)
SAMPLING_COLUMNS = (TEMPERATURE, *FILTERS, SEED, *PENALTIES, IS_PENALIZED, *BIAS, NUM_LOGPROBS, OF_GRAMMAR)
