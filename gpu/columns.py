"""What a column of the row table is: one number of every request, told once.

Whoever computes with a column declares it beside its mathematics (`gpu.sampling.filters` has those of the filters).
`gpu.rows` lists them all and keeps them on the host, `gpu.device.tables` on a device, and from there samplers, kernels
and the library take them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages import SamplingParams
from engine.scheduler.plan import NewRequestData


@dataclass(frozen=True)
class Column:
    """`default` is what a row holds in which there is no request: whatever can be off is off."""

    name: str
    dtype: type[np.generic]  # on the host
    default: float
    fill: Callable[[NewRequestData], float]
    host_only: bool = False

    @property
    def device_dtype(self) -> type[np.generic]:
        """32 bits are enough for all but a seed, whose 64 are read as a signed number."""
        if self.dtype is np.uint64:
            return np.int64
        return np.float32 if issubclass(self.dtype, np.floating) else np.int32


def parameter(name: str, dtype: type[np.generic]) -> Column:
    """The column of a number in `SamplingParams`, taken as it is."""
    return Column(name, dtype, getattr(SamplingParams(), name), attrgetter(f"sampling.{name}"))


def make_columns(columns: Iterable[Column], num_rows: int) -> dict[str, NDArray[Any]]:
    """By name, [num_rows] each, with nothing but defaults."""
    return {column.name: np.full(num_rows, column.default, dtype=column.dtype) for column in columns}
