"""From logits to token ids: what every request's decoding knobs mean, for a whole batch at once.

The model runner is the only caller. It keeps a `SamplingState` beside its input batch, selects from it the rows that
sample in a step, and hands the result to `sample` together with their logits. Nothing here loops over requests, save
over those that use a sparse feature (logit bias, min_tokens, penalties, logprobs).

In reading order:

sampler    one step's logits in, one token per row out: the order of operations
state      the decoding knobs of every request in the batch, as columns
masks      what a row may sample at all
penalties  repetition, presence and frequency penalties
greedy     the largest logit of each row
filters    min-p, top-k and top-p as one threshold per row
noise      one uniform number per token, from the request's seed and the position
logprobs   log-probabilities for the rows that ask
"""

from gpu.sampling.masks import logits_mask
from gpu.sampling.sampler import SamplerOutput, sample
from gpu.sampling.state import SamplingMetadata, SamplingState

__all__ = ["SamplerOutput", "SamplingMetadata", "SamplingState", "logits_mask", "sample"]
