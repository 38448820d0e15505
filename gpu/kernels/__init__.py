"""Fused kernels in Triton, each with a plain reference implementation in torch. Imported by the layers and the runner
of a CUDA device.

Every public function takes and returns tensors and says what it computes. Tensors on a CUDA device go to the kernel in
`gpu.kernels.jit`; others go to the reference, which stands beside the public function and is held to the same tests.
(Those of the kernels run in Triton's interpreter: `gpu.kernels.dispatch.interpreted`.) So what calls kernels runs on a
CPU too, and Triton is imported only where it is used.

None of them synchronizes with the host, and no shape or grid depends on what a tensor holds: all may be captured in a
CUDA graph, and a graph's padding is marked in the data (`slot_mapping` -1, `seq_lens` 0). Accumulation is float32
whatever the dtype; the sums of one row are taken in an order that does not depend on the other rows.

In reading order:

norm               residual addition and RMSNorm in one pass
activation         the elementwise half of SwiGLU and GeGLU
experts            a mixture of experts around its matrices: routes, groups, grouped products
gather             rows by index: of the embedding, of the hidden states that sample
rope               from the merged projection to rotated queries and a written cache; the layout of the KV cache
attention          attention over the paged KV cache: decode and prefill
sample             one token per row of logits, without a sort or a softmax
noise              counter-based noise, which is what a seed means
logits_processors  what changes logits before a token is drawn: bias, penalties, the tokens a grammar allows
logprobs           log-probabilities from a row's log-sum-exp
step               a step's diffs, inputs and tokens between the tables of the device and the model
shapes             types that the kernels and their references share
dispatch           which of the two, kernel or reference
jit                the kernels themselves
"""

from gpu.kernels.activation import clamped_swiglu, gelu_and_mul, silu_and_mul
from gpu.kernels.attention import AttentionWork, list_attention_work, paged_attention
from gpu.kernels.experts import combine, group_rows, grouped_linear, route
from gpu.kernels.gather import gather_rows
from gpu.kernels.logits_processors import add_bias, apply_bitmask, apply_penalties
from gpu.kernels.logprobs import LogprobTensors, compute_logprobs
from gpu.kernels.norm import add_rms_norm
from gpu.kernels.rope import rope_and_cache
from gpu.kernels.sample import sample_tokens
from gpu.kernels.shapes import Groups
from gpu.kernels.step import record_step, scatter_words, step_inputs

__all__ = [
    "AttentionWork",
    "Groups",
    "LogprobTensors",
    "add_bias",
    "add_rms_norm",
    "apply_bitmask",
    "apply_penalties",
    "clamped_swiglu",
    "combine",
    "compute_logprobs",
    "gather_rows",
    "gelu_and_mul",
    "group_rows",
    "grouped_linear",
    "list_attention_work",
    "paged_attention",
    "record_step",
    "rope_and_cache",
    "route",
    "sample_tokens",
    "scatter_words",
    "silu_and_mul",
    "step_inputs",
]
