"""Plans for one request and metadata for one batch, with the fields a test cares about."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from engine.messages import SamplingParams
from engine.plan import NewRequestData
from gpu.cpu.library import Threads, draw, load_library
from gpu.runner.rows import COLUMNS
from gpu.sampling import draw as reference
from gpu.sampling import sampler
from gpu.sampling.columns import make_columns
from gpu.sampling.logits import Biases, Penalized
from gpu.sampling.sampler import Draw, SamplerOutput, SamplingMetadata


def new_request(
    request_id: str = "r",
    token_ids: Sequence[int] = (0,),
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    block_ids: list[int] | None = None,
    stop_token_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids or [],
        sampling=SamplingParams(**({"seed": 0} | sampling)),
        stop_token_ids=list(stop_token_ids),
    )


class SamplingRows:
    """As much of the row table and of the input batch as sampling needs."""

    def __init__(self, num_rows: int) -> None:
        self.columns = make_columns(COLUMNS, num_rows)
        self.biases, self.penalized = Biases(self.columns), Penalized(self.columns)

    def add(self, row: int, request: NewRequestData) -> None:
        for column in COLUMNS:
            self.columns[column.name][row] = column.fill(request)
        self.biases.add(row, request)
        self.penalized.add(row, request)

    def remove(self, row: int) -> None:
        self.biases.remove(row)
        self.penalized.remove(row)

    def select(self, rows: list[int], positions: list[int]) -> SamplingMetadata:
        at = np.array(rows), np.array(positions)
        bias, penalties = self.biases.select(*at), self.penalized.select(at[0])
        return SamplingMetadata(columns=self.columns, rows=at[0], positions=at[1], bias=bias, penalties=penalties)


def metadata_of(requests: list[NewRequestData]) -> SamplingMetadata:
    """The metadata of a batch in which every one of `requests` samples its next token."""
    rows = SamplingRows(len(requests))
    for row, request in enumerate(requests):
        rows.add(row, request)
    return rows.select(list(range(len(requests))), [len(request.token_ids) for request in requests])


@cache
def fastest_draw() -> Draw:
    """What draws on this machine."""
    library = load_library()
    return reference.draw if library is None else partial(draw, Threads(library, 2))


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """`gpu.sampling.sampler.sample` of a tensor, which may be overwritten."""
    return sampler.sample(logits.float().numpy(), metadata, fastest_draw())
