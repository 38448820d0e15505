"""Log-probabilities from a row's log-sum-exp: no [S, vocab] tensor is made for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.kernels.dispatch import on_triton


class LogprobTensors(NamedTuple):
    """Of S rows, on the device."""

    chosen: torch.Tensor  # float32 [S], of the token drawn
    ranks: torch.Tensor  # int64 [S], one more than the number of tokens with a strictly greater logit
    top_ids: torch.Tensor  # int64 [S, num_top]
    top: torch.Tensor  # float32 [S, num_top], descending


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """For raw logits ([S, vocab], any float dtype: before bias, penalties and temperature) and int64 [S] tokens.

    `num_top` is how many of the most likely tokens to name, for all rows alike; it may be 0.
    """
    if on_triton(logits):
        from gpu.kernels.jit import logprobs

        log_sum, chosen, greater = logprobs.row_statistics(logits, token_ids)
    else:
        log_sum, chosen, greater = row_statistics_reference(logits, token_ids)
    # Of the vocabulary's order only these few matter: a selection, which torch makes by radix, without sorting a row.
    top = logits.topk(num_top)
    return LogprobTensors(chosen - log_sum, greater + 1, top.indices, top.values.float() - log_sum.unsqueeze(1))


def row_statistics_reference(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-sum-exp of each row, the logit of its token, and how many are greater: float32, float32, int64 [S]."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    return logits.logsumexp(-1), chosen.squeeze(1), (logits > chosen).sum(-1)
