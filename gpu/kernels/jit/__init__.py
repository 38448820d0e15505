"""The Triton side of gpu.kernels, imported only where Triton runs.

A module holds the kernels and the functions that launch them; what they compute is said by the public functions.
In reading order:

norm               residual addition and RMSNorm: one program per row
activation         SwiGLU's elementwise half
experts            of a mixture: products of rows grouped by expert, and their sum
gather             rows by index
rope               rotation, and the write to the KV cache
work_lists         of `attention`: which program does what
decode             of `attention`: one query per request, by split-KV attention over pages, and the merge of the parts
prefill            of `attention`: many queries per request over pages, causal
online             what both share: the running softmax
sample             the race over the vocabulary in chunks, and the choice among their winners
cutoff             of `sample`: top-k, top-p and min-p as the lowest logit that a row keeps
logits_processors  bias, penalties and token masks, in place
step               a step's diffs, inputs and tokens: one program per segment or request
logprobs           log-probabilities: one program per row
"""

import os

# Triton 3.10 no longer fuses multiplications and additions by default, which would change the last bits of results.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
