"""Plans for one request and metadata for one batch, with the fields a test cares about."""

from __future__ import annotations

import numpy as np

from engine.messages import SamplingParams
from engine.scheduler.plan import NewRequestData
from gpu.sampling import SamplingMetadata, SamplingState


def new_request(
    request_id: str = "r",
    token_ids: tuple[int, ...] | list[int] = (0,),
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    block_ids: list[int] | None = None,
    stop_token_ids: tuple[int, ...] = (),
    **sampling: object,
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


def metadata_of(requests: list[NewRequestData]) -> SamplingMetadata:
    """The metadata of a batch in which every one of `requests` samples its next token."""
    state = SamplingState(len(requests))
    for row, request in enumerate(requests):
        state.add(row, request)
    num_tokens = np.array([len(request.token_ids) for request in requests], dtype=np.int32)
    return state.select(np.arange(len(requests)), num_tokens)
