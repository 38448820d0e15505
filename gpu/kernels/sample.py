"""One token per row of logits: no sort, no softmax, no copy of the logits, no word to the host.

A token is drawn as the winner of a race: the largest of `logit / temperature - log(E)` over the vocabulary, with an
exponential variate E for each token (`gpu.kernels.noise`), is distributed as the softmax of `logit / temperature`
(Gumbel, 1954). Filters only exclude runners, so nothing is normalized.

What a seed means: with these kernels, the same logits, parameters, seed and position give the same token, in whatever
batch and whatever row. The sampler of `gpu.sampling`, which serves on a CPU, draws by inverting the cumulative
distribution at one uniform number instead, which is cheaper there. So a seed repeats itself on either kind of device,
but does not carry over from one to the other, as it does not between two servers of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.kernels.dispatch import on_triton
from gpu.kernels.noise import exponential_noise


@dataclass(frozen=True, kw_only=True)
class SamplingTable:
    """Parameters by stable row: columns [max_num_seqs] on the device."""

    temperature: torch.Tensor  # float32; 0 is greedy
    top_k: torch.Tensor  # int32; 0 is off
    top_p: torch.Tensor  # float32; 1 is off
    min_p: torch.Tensor  # float32; 0 is off
    seed: torch.Tensor  # int64, the seed's 64 bits


def sample_tokens(
    logits: torch.Tensor,
    table: SamplingTable,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of `logits` ([S, vocab], contiguous, any float dtype; left as it is).

    `rows` (int64 [S]) are the places in the table, and `positions` (int64 [S]) those of the tokens to be drawn, counted
    from the start of the prompt. `filtered` False says that no row uses top-k, top-p or min-p, which saves a launch;
    what they would have meant is then ignored.

    The order of the filters is vLLM's: min-p first, then top-k, then top-p on what is left, renormalized; what ties
    with the last token kept is kept. A greedy row takes the largest logit, the lowest id of several.

    Returns int64 [S], always valid ids; and bool [S], False where a row holds NaN or +inf, or nothing but -inf, and its
    token means nothing.
    """
    if on_triton(logits):
        from gpu.kernels.jit import sample

        return sample.sample_tokens(logits, table, rows, positions, filtered)
    return sample_tokens_reference(logits, table, rows, positions, filtered=filtered)


def sample_tokens_reference(
    logits: torch.Tensor,
    table: SamplingTable,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_tokens` in torch."""
    logits = logits.float()
    temperature = table.temperature[rows].unsqueeze(1)
    drawn = temperature > 0
    scaled = torch.where(drawn, logits / temperature, logits)
    noise = exponential_noise(table.seed[rows], positions, logits.shape[1])
    scores = torch.where(drawn, scaled - noise.log(), scaled)
    if filtered:
        level = cutoffs_reference(logits, table, rows)
        scores = scores.masked_fill_(drawn & (logits < level.unsqueeze(1)), float("-inf"))
    highest = logits.amax(-1)  # NaN counts as highest
    return scores.nan_to_num(nan=float("-inf")).argmax(-1), highest.isfinite()


def cutoffs_reference(logits: torch.Tensor, table: SamplingTable, rows: torch.Tensor) -> torch.Tensor:
    """The lowest logit that each row keeps, float32 [S]: by sorting, in float64. Greedy rows keep everything."""
    ordered = logits.double().sort(-1, descending=True).values
    temperature = table.temperature[rows].double().unsqueeze(1)
    top_k, top_p, min_p = (column[rows].unsqueeze(1) for column in (table.top_k, table.top_p, table.min_p))
    probs = ((ordered - ordered[:, :1]) / temperature.clamp(min=1e-30)).softmax(-1)
    vocab_size = logits.shape[1]
    kth = ordered.gather(1, torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1)
    floor = torch.maximum(kth, ordered[:, :1] + temperature * min_p.double().log())
    mass = (probs * (ordered >= floor)).cumsum(-1)
    reached = mass >= top_p.double() * mass[:, -1:]
    nucleus = ordered.gather(1, reached.int().argmax(-1, keepdim=True))
    level = torch.where(top_p < 1, torch.maximum(floor, nucleus), floor)
    return level.masked_fill(temperature == 0, float("-inf")).squeeze(1).float()
