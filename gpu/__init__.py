"""The device side: executor, worker, runner, models, kernels, weights and checkpoints.

From the engine, this package imports the plan, messages, errors, the executor interface and child processes. It has no
HTTP. Host code uses numpy; only modules that compute with torch import it.

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

# OpenMP threads spin while they wait for each other. If anything else runs (an event loop, a tokenizer, a second
# server), a spinning thread takes the core from the thread that it waits for: on a machine with two busy cores, steps
# took 3 to 10 times as long. Sleeping costs some microseconds per parallel region. OpenMP reads the variable when torch
# is loaded, so it must be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
