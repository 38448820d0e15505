"""The sampler: one step's logits in, one token per row out.

The model runner imports it. It promises that a row's token depends on nothing but that row's logits, parameters, seed
and position: every operation works through rows independently, and the randomness is counter-based (`noise`).

The order of operations is vLLM's, because clients tune their parameters to it:

0. tokens that the request's grammar does not allow get -inf, for whatever follows;
1. log-probabilities are those of the raw logits;
2. logit bias, and so much less for stop tokens that none comes while any other may, until min_tokens are there;
3. repetition, then frequency and presence penalties;
4. greedy rows: the largest logit, the lowest id where several are largest;
5. other rows: temperature, min-p, top-k, top-p, then the token at which the cumulative distribution, in order of token
   id, passes the row's one uniform number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.scheduler.plan import NewRequestData
from gpu.columns import Column
from gpu.cpu.sampling import can_draw, draw
from gpu.sampling.bias import SparseBias
from gpu.sampling.filters import FILTERS, cutoffs
from gpu.sampling.greedy import largest
from gpu.sampling.logprobs import token_logprobs
from gpu.sampling.masks import apply_mask
from gpu.sampling.metadata import SamplingMetadata
from gpu.sampling.noise import uniform
from gpu.sampling.penalties import apply_penalties

# Below this a temperature is indistinguishable from greedy, but dividing by it could leave float32's range.
_MIN_TEMPERATURE = 1e-5


def _temperature(request: NewRequestData) -> float:
    params = request.sampling
    # With one token left to choose from there is nothing to draw: top_k 1 is greedy, also where logits tie.
    return 0.0 if params.greedy or params.top_k == 1 else max(params.temperature, _MIN_TEMPERATURE)


TEMPERATURE = Column("temperature", np.float32, 0.0, _temperature)  # 0 is greedy


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """Parallel to the logits; S rows."""

    token_ids: NDArray[np.int64]  # [S], always a valid id
    # bool [S]. False where the logits hold NaN or +inf, or nothing but -inf: the token of that row means nothing.
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]  # by row, only for rows that asked


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample one token for each row of `logits` ([S, vocab] in the model's dtype, may be overwritten)."""
    if metadata.is_plain_greedy:
        token_ids, finite = largest(logits)
        return SamplerOutput(token_ids=token_ids, finite=finite, logprobs={})
    if metadata.mask is not None:
        apply_mask(logits, metadata.mask)
    greedy = metadata["temperature"] == 0.0
    all_greedy = bool(greedy.all())
    num_logprobs = metadata["num_logprobs"]
    asking = np.flatnonzero(num_logprobs >= 0)

    logits = logits.float()
    raw_logits = logits[torch.from_numpy(asking).to(logits.device)] if len(asking) else None

    if metadata.bias is not None:
        _add_bias(logits, metadata.bias)
    if metadata.penalties is not None:
        apply_penalties(logits, metadata.penalties)

    if all_greedy:
        token_ids, finite = largest(logits)
    elif not greedy.any():
        token_ids, finite = _draw(logits, metadata)
    else:
        token_ids = np.empty(len(greedy), dtype=np.int64)
        finite = np.empty(len(greedy), dtype=bool)
        for indices, drawn in ((np.flatnonzero(greedy), False), (np.flatnonzero(~greedy), True)):
            part = logits[torch.from_numpy(indices).to(logits.device)]
            token_ids[indices], finite[indices] = _draw(part, metadata.drawing(indices)) if drawn else largest(part)

    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits is not None:
        structs = token_logprobs(raw_logits, token_ids[asking], num_logprobs[asking])
        logprobs = dict(zip(asking.tolist(), structs, strict=True))
    return SamplerOutput(token_ids=token_ids, finite=finite, logprobs=logprobs)


def _add_bias(logits: torch.Tensor, bias: SparseBias) -> None:
    device = logits.device
    where = (torch.from_numpy(bias.rows).to(device), torch.from_numpy(bias.token_ids).to(device))
    # Accumulating, because a stop token may carry a bias too.
    logits.index_put_(where, torch.from_numpy(bias.values).to(device), accumulate=True)


def _draw(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw from each row of `logits` (overwritten)."""
    if can_draw(logits):
        parameters = [metadata[column.name] for column in (TEMPERATURE, *FILTERS)]
        return draw(logits, *parameters, uniform(metadata["seed"], metadata.positions))
    return draw_with_torch(logits, metadata)


def draw_with_torch(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The draw as torch computes it: the definition, and what serves where the library was not built."""
    device = logits.device
    # The largest logit becomes 0, so that no temperature can make it overflow.
    logits -= logits.amax(-1, keepdim=True)
    logits /= torch.from_numpy(metadata["temperature"]).to(device).unsqueeze(1)
    probs = logits.softmax(-1)

    filters = [metadata[column.name] for column in FILTERS]
    filtered = np.flatnonzero(
        np.any([part != column.default for part, column in zip(filters, FILTERS, strict=True)], 0)
    )
    if len(filtered):
        rows = torch.from_numpy(filtered).to(device)
        level = torch.zeros(len(probs), dtype=probs.dtype, device=device)
        level[rows] = cutoffs(
            probs if len(filtered) == len(probs) else probs[rows],
            *(torch.from_numpy(part[filtered]).to(device) for part in filters),
        )
        probs *= probs >= level.unsqueeze(1)

    # In float64, because sums near 1 have no room in float32 for tokens of probability below 6e-8. The uniform is at
    # most 1 - 2**-53, so its product with the total rounds below the total, and the first sum above it belongs to a
    # token that is kept.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(uniform(metadata["seed"], metadata.positions)).to(device).unsqueeze(1) * total
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    finite = total.squeeze(1).isfinite()  # NaN anywhere in the row has reached the total
    return token_ids.clamp_(max=logits.shape[-1] - 1).cpu().numpy(), finite.cpu().numpy()
