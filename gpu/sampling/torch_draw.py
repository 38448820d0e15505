"""The draw in torch: what serves where the library of `gpu.cpu` was not built, and what tests hold the library to.

Imported where it is needed, because torch is. min-p, top-k and top-p are one number per row: the smallest probability
that may still be drawn. All three filters keep the most probable tokens down to some level, so the strictest level is
their intersection, and neither a sorted copy of the vocabulary nor a scatter back is needed. Tokens that tie with the
last one kept are kept too: which of them goes would otherwise depend on the sorting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.sampling.columns import FILTERS

# How many of the most probable tokens are looked at before the next, wider try. At 32 rows of 49,152 on two cores the
# three cost 2.8, 11 and 57 ms; a nucleus of more than 256 tokens is rare and one of more than 4,096 rarer still.
CANDIDATES = (256, 4096)


@torch.inference_mode()
def draw(logits: NDArray[np.float32], *parameters: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A `gpu.sampling.sampler.Draw`."""
    temperature, *filters, uniform = parameters
    # The largest logit becomes 0, so that no temperature can make it overflow.
    scores = torch.from_numpy(logits)
    scores -= scores.amax(-1, keepdim=True)
    scores /= torch.from_numpy(temperature).unsqueeze(1)
    probs = scores.softmax(-1)

    filtered = np.flatnonzero(
        np.any([part != column.default for part, column in zip(filters, FILTERS, strict=True)], 0)
    )
    if len(filtered):
        rows = torch.from_numpy(filtered)
        level = torch.zeros(len(probs), dtype=probs.dtype)
        level[rows] = cutoffs(
            probs if len(filtered) == len(probs) else probs[rows],
            *(torch.from_numpy(part[filtered]) for part in filters),
        )
        probs *= probs >= level.unsqueeze(1)

    # In float64, because sums near 1 have no room in float32 for tokens of probability below 6e-8. The uniform is at
    # most 1 - 2**-53, so its product with the total rounds below the total, and the first sum above it belongs to a
    # token that is kept.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(uniform).unsqueeze(1) * total
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    finite = total.squeeze(1).isfinite()  # NaN anywhere in the row has reached the total
    return token_ids.clamp_(max=logits.shape[-1] - 1).numpy(), finite.numpy()


def cutoffs(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    candidates: tuple[int, ...] = CANDIDATES,
) -> torch.Tensor:
    """The lowest probability kept in each row: [S], of the dtype of `probs`.

    `probs` is [S, vocab], rows summing to 1. `top_k` (int64, 0 is off), `top_p` (float64, 1 is off) and `min_p`
    (float64, 0 is off) are [S]. The order is vLLM's: min-p first, then top-k, then top-p on what is left, renormalized.

    Exact for every row: rows whose cut lies outside the first `candidates` are tried again with more of them, at last
    with the whole vocabulary sorted. A row's result does not depend on the width that found it.
    """
    vocab_size = probs.shape[-1]
    result = torch.empty(probs.shape[0], dtype=probs.dtype, device=probs.device)
    pending = torch.arange(probs.shape[0], device=probs.device)
    for width in (*(c for c in candidates if c < vocab_size), vocab_size):
        rows = probs if len(pending) == len(probs) else probs[pending]
        level, found = _cutoffs_within(rows, top_k[pending], top_p[pending], min_p[pending], width)
        result[pending] = level
        pending = pending[~found]
        if len(pending) == 0:
            break
    return result


def _cutoffs_within(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cut-offs as far as the `width` most probable tokens tell, and for which rows they tell all: [S], bool [S]."""
    whole = width == probs.shape[-1]
    values = probs.sort(descending=True).values if whole else probs.topk(width).values
    mass = values.cumsum(-1, dtype=torch.float64)

    # min-p and top-k first: the level of both together, `floor`, and how many candidates reach it.
    kth = values.gather(1, (top_k.clamp(1, width) - 1).unsqueeze(1)).squeeze(1)
    kth = torch.where((top_k == 0) | (top_k > width), 0.0, kth)
    floor = torch.maximum(kth, (values[:, 0] * min_p).to(values.dtype))
    num_kept = (values >= floor.unsqueeze(1)).sum(-1).clamp(min=1)
    # A floor above the last candidate has every survivor among the candidates, ties included. (With top_k beyond the
    # width that can only come from min-p, which then leaves fewer than top_k and decides alone.)
    inside = floor > values[:, -1]
    unlimited = (floor == 0) & (top_k == 0)

    # top-p: the shortest run of candidates that holds its share of what the floor leaves.
    total = torch.where(unlimited, 1.0, mass.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1))
    needed = (top_p * total).unsqueeze(1)
    last = torch.minimum(torch.searchsorted(mass, needed).squeeze(1), num_kept - 1)
    nucleus = values.gather(1, last.unsqueeze(1)).squeeze(1)
    reached = (mass[:, -1:] >= needed).squeeze(1)
    level = torch.where(top_p < 1.0, torch.maximum(floor, nucleus), floor)
    # The floor itself is known sooner than the mass above it, which only top-p asks for.
    found = inside | torch.where(top_p < 1.0, unlimited & reached, top_k <= width)
    return level, torch.ones_like(found) if whole else found
