"""How to sample some logits: rows of the row table's columns, and what few of them want besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.sampling.bias import SparseBias
from gpu.sampling.masks import LogitsMask
from gpu.sampling.penalties import Penalties


@dataclass(frozen=True, kw_only=True)
class SamplingMetadata:
    """S rows of logits, all on the host. Logits i are sampled with the parameters in row `rows[i]` of `columns`."""

    columns: Mapping[str, NDArray[Any]]  # `gpu.sampling.SAMPLING_COLUMNS` and maybe more, not to be written to
    rows: NDArray[np.int64]  # [S]
    positions: NDArray[np.int64]  # [S], of the tokens to be sampled, counted from the start of their prompts
    mask: LogitsMask | None = None  # of the requests' grammars
    bias: SparseBias | None = None
    penalties: Penalties | None = None

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column of these rows, [S]."""
        return self.columns[name][self.rows]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest logit of each row is all that matters."""
        return (
            self.mask is None
            and self.bias is None
            and self.penalties is None
            and not self["temperature"].any()
            and bool((self["num_logprobs"] < 0).all())
        )

    def of_tokens(self, first: int, last: int) -> SamplingMetadata:
        """The same for logits of these tokens alone, of which the first is a multiple of 8."""
        mask, bias, penalties = self.mask, self.bias, self.penalties
        if mask is not None:
            mask = replace(mask, bits=mask.bits.view(np.uint8)[:, first // 8 : -(-last // 8)])
        if bias is not None:
            bias = bias.of_tokens(first, last)
        if penalties is not None:
            penalties = penalties.of_tokens(first, last)
        return replace(self, mask=mask, bias=bias, penalties=penalties)

    def drawing(self, indices: NDArray[np.int64]) -> SamplingMetadata:
        """What the draw itself needs, for some of the rows: mask, bias and penalties are left behind."""
        rows, positions = self.rows[indices], self.positions[indices]
        return replace(self, rows=rows, positions=positions, mask=None, bias=None, penalties=None)
