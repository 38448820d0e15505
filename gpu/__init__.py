"""The device side: executor, worker, runner, models, kernels, weights and checkpoints.

Of the engine it imports the plan, messages, errors, the executor seam and child processes. It knows no HTTP.
The host's side is numpy; torch is imported where it computes.

In reading order:

host          The machine: cores, memory, processor flags, shared memory.
cuda_host     Checks of the driver, the C compiler and the kernel cache folder before a model is loaded on CUDA.
checkpoint    A model's files: configuration, tokenizer, chat template and tensors. Imports no torch.
rotary        The angles of rotary position embedding.
kv_cache      The layout of keys and values, and the number of blocks that fit.
sharding      The layout of ranks, and the part of each tensor that a rank holds.
weights       A checkpoint's tensors as arrays or torch tensors on a device.
sampling      Logits to token ids.
runner        What runs a plan: the interface, the row table, and the runner on the host.
profile       Profiles of a worker's steps.
cpu           The decoder's step by the C++ library.
kernels       Triton kernels, each with a reference in torch.
attention     Attention over the paged KV cache.
models        The models in torch, from layers to the decoder.
device        The runner of a device that computes while the host goes on.
model_loader  The choice of a device, and the loading of a model onto it.
kv_tiers      Keys and values kept on disk and in the host's memory.
worker        One device with its model, KV cache and runner.
executor      The executors that the engine is given.
parallel      A model on several ranks.
"""

import os

# OpenMP's threads spin while they wait for each other, and a spinning thread takes the core from the very thread that
# it waits for as soon as anything else runs: an event loop, a tokenizer, a second server. With both cores of a small
# machine contended, steps took 3 to 10 times as long. Sleeping costs some microseconds per parallel region. It is read
# when torch is loaded, so it has to be said before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
