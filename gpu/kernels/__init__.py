"""Fused kernels in Triton, each with a plain reference in torch. Imported by the layers and the runner of a CUDA
device.

1. Tensors on a CUDA device go to the kernel, others to the reference, so callers run on a CPU too. Both pass the same
   tests; the kernels run in Triton's interpreter there (`dispatch.interpreted`).
2. No function synchronizes with the host, and no shape or grid depends on what a tensor holds, so all can be captured
   in a CUDA graph. A graph's padding is marked in the data (`slot_mapping` -1, `seq_lens` 0).
3. Accumulation is float32 for any dtype. The sums of one row are taken in an order that does not depend on other rows.

In reading order:

dispatch     The choice between kernel and reference, and Triton or its stand-in.
elementwise  RMSNorm with the residual addition, gated activations, rows by index.
experts      A mixture of experts around its matrices: routes, groups, grouped products.
product      Products of few rows with a matrix that is not quantized.
quantized    Products with weights of 4 and 8 bits.
rope         Rotary positions, the write to the KV cache, and its layout.
attention    Attention over the paged KV cache, its reference, and the work list of its kernels.
decode       The attention kernel for one query per request, and the running softmax that both attention kernels share.
prefill      The attention kernel for many queries per request.
whole        Attention of encoders to all tokens of a prompt.
logits       Bias, token masks, penalties, and log-probabilities.
sample       One token per row of logits, and the counter-based noise that gives a seed its meaning.
step         Updates of the device's tables, a step's inputs, and its sampled tokens.
"""

from gpu.kernels.attention import AttentionWork, list_attention_work, paged_attention
from gpu.kernels.elementwise import add_rms_norm, clamped_swiglu, gather_rows, gelu_and_mul, silu_and_mul
from gpu.kernels.experts import Groups, combine, group_rows, grouped_linear, route, route_in_groups
from gpu.kernels.logits import LogprobTensors, add_bias, apply_bitmask, apply_penalties, compute_logprobs
from gpu.kernels.rope import rope_and_cache
from gpu.kernels.sample import sample_tokens
from gpu.kernels.step import record_step, scatter_words, step_inputs
