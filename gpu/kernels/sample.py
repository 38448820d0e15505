"""One token per row of logits: no sort, no softmax, no copy of the logits, no word to the host.

A token is drawn as the winner of a race: the largest of `logit / temperature - log(E)` over the vocabulary, with an
exponential variate E for each token (`gpu.kernels.noise`), is distributed as the softmax of `logit / temperature`
(Gumbel, 1954). Filters only exclude runners, so nothing is normalized.

What a seed means: with these kernels, the same logits, parameters, seed and position give the same token, in whatever
batch and whatever row. The sampler of `gpu.sampling.columns`, which serves on a CPU, draws by inverting the cumulative
distribution at one uniform number instead, which is cheaper there. So a seed repeats itself on either kind of device,
but does not carry over from one to the other, as it does not between two servers of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu.kernels.dispatch import on_triton
from gpu.kernels.noise import exponential_noise
from gpu.sampling.columns import FILTERS
from gpu.sampling.torch_draw import cutoffs


def sample_tokens(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of `logits` ([S, vocab], contiguous, any float dtype; left as it is).

    `columns` are those of the row table on the device: temperature, the filters' and seed, [max_num_seqs] each. `rows`
    (int64 [S]) are places in them, and `positions` (int64 [S]) those of the tokens to be drawn, counted from the start
    of the prompt.

    The order of the filters is vLLM's: min-p first, then top-k, then top-p on what is left, renormalized; what ties
    with the last token kept is kept. A greedy row takes the largest logit, the lowest id of several.

    Returns int64 [S], always valid ids; and bool [S], False where a row holds NaN or +inf, or nothing but -inf, and its
    token means nothing.
    """
    if on_triton(logits):
        from gpu.kernels.jit import sample

        return sample.sample_tokens(logits, columns, rows, positions)
    return sample_tokens_reference(logits, columns, rows, positions)


def sample_tokens_reference(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_tokens` in torch."""
    logits = logits.float()
    temperature = columns["temperature"][rows].unsqueeze(1)
    drawn = temperature > 0
    scaled = torch.where(drawn, logits / temperature, logits)
    noise = exponential_noise(columns["seed"][rows], positions, logits.shape[1])
    scores = torch.where(drawn, scaled - noise.log(), scaled)
    level = cutoffs_reference(logits, columns, rows)
    scores = scores.masked_fill_(drawn & (logits < level.unsqueeze(1)), float("-inf"))
    highest = logits.amax(-1)  # NaN counts as highest
    return scores.nan_to_num(nan=float("-inf")).argmax(-1), highest.isfinite()


def cutoffs_reference(logits: torch.Tensor, columns: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The lowest logit that each row keeps, float32 [S]: `gpu.sampling.torch_draw` in float64. Greedy rows keep
    all."""
    temperature = columns["temperature"][rows].double().unsqueeze(1)
    probs = (logits.double() / temperature.clamp(min=1e-30)).softmax(-1)
    filters = (columns[column.name][rows] for column in FILTERS)
    level = cutoffs(probs, *(part.double() if part.is_floating_point() else part.long() for part in filters))
    kept = (probs >= level.unsqueeze(1)) | (temperature == 0)
    return logits.masked_fill(~kept, float("inf")).amin(-1).float()
