"""From logits to token ids: what every request's decoding knobs mean, for a whole batch at once.

The model runner is the only caller. It keeps a `SamplingState` beside its input batch, selects from it the rows that
sample in a step, and hands the result to `sample` together with their logits. Nothing here loops over requests, save
over those that use a sparse feature (logit bias, min_tokens, penalties, logprobs).

Reading order: `sampler` (the order of operations), `masks`, `greedy`, `filters`, `noise`, `penalties`, `logprobs`,
`state`.
"""

from gpu.sampling.masks import logits_mask
from gpu.sampling.sampler import SamplerOutput, sample
from gpu.sampling.state import SamplingMetadata, SamplingState

__all__ = ["SamplerOutput", "SamplingMetadata", "SamplingState", "logits_mask", "sample"]
