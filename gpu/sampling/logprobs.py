"""Log-probabilities for the rows that ask: of the token drawn, its rank, and of the most likely tokens.

The sampler imports it. They describe the model, so they come from its raw logits: before bias, penalties and
temperature.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.scheduler.plan import NewRequestData
from gpu.columns import Column


def _num_logprobs(request: NewRequestData) -> int:
    return -1 if request.sampling.logprobs is None else request.sampling.logprobs


# -1 is none, 0 the sampled token's only.
NUM_LOGPROBS = Column("num_logprobs", np.int64, -1, _num_logprobs, host_only=True)


def token_logprobs(
    raw_logits: torch.Tensor, token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """What each row asked for. `raw_logits` is float32 [A, vocab], the others are [A]; `num_logprobs` may hold zeros.

    The rank is one more than the number of tokens with a strictly greater logit.
    """
    chosen_ids = torch.from_numpy(token_ids).to(raw_logits.device).unsqueeze(1)
    chosen_logits = raw_logits.gather(1, chosen_ids)
    # Not logsumexp: log_softmax works through each row on its own, so the bits do not depend on the batch.
    logprobs = raw_logits.log_softmax(-1)
    chosen = logprobs.gather(1, chosen_ids).squeeze(1).tolist()
    ranks = ((raw_logits > chosen_logits).sum(-1) + 1).tolist()
    counts = num_logprobs.tolist()
    top = logprobs.topk(min(max(counts), logprobs.shape[-1]))
    return [
        TokenLogprobs(token_id, logprob, rank, list(zip(top_ids[:count], top_values[:count], strict=True)))
        for token_id, logprob, rank, count, top_ids, top_values in zip(
            token_ids.tolist(), chosen, ranks, counts, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
