"""From logits to token ids: what every request's decoding knobs mean, for a whole batch at once.

The host's runner calls `sample` with logits and the rows of the row table that they belong to, all in numpy; the
device's has kernels for it and takes columns, bias and masks from here. Nothing here loops over requests, save over
those that use a sparse feature (logit bias, min_tokens, penalties, masks, logprobs).

In reading order:

sampler     one step's logits in, one token per row out: the order of operations
metadata    how to sample some logits: rows of the row table, and what few of them want besides
masks       what a row may sample at all
bias        what is added to single logits: logit_bias, stop tokens before min_tokens
penalties   repetition, presence and frequency penalties
greedy      the largest logit of each row
noise       one uniform number per token, from the request's seed and the position
logprobs    log-probabilities for the rows that ask
torch_draw  the draw in torch, where there is no library
shards      all of it where each of several ranks has some of the logits
"""

from gpu.sampling.bias import BIAS, Biases, SparseBias
from gpu.sampling.logprobs import EVERY, NUM_LOGPROBS, OF_GRAMMAR, NamedTokens, token_logprobs
from gpu.sampling.masks import logits_mask
from gpu.sampling.metadata import SamplingMetadata
from gpu.sampling.noise import SEED
from gpu.sampling.penalties import IS_PENALIZED, PENALTIES, Penalized
from gpu.sampling.sampler import FILTERS, TEMPERATURE, SamplerOutput, sample

SAMPLING_COLUMNS = (TEMPERATURE, *FILTERS, SEED, *PENALTIES, IS_PENALIZED, *BIAS, NUM_LOGPROBS, OF_GRAMMAR)

__all__ = [
    "EVERY",
    "SAMPLING_COLUMNS",
    "Biases",
    "NamedTokens",
    "Penalized",
    "SamplerOutput",
    "SamplingMetadata",
    "SparseBias",
    "logits_mask",
    "sample",
    "token_logprobs",
]
