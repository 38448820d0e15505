"""What touches the device: executor, worker, model runner, models, layers, attention and weights; and checkpoints.

Imports of the engine are limited to its plan, KV groups, messages, errors and executor seam. Nothing here knows HTTP.

In reading order:

executor        how a plan gets to the device: what the engine is handed
worker          one device with its model, its KV cache and its runner
runner          what runs a plan, whatever device it is for, and what it needs of a model
model_runner    the runner that keeps its batch on the host and waits for its tokens
rows            the row table: what is remembered of every request between steps, and what a step is to it
columns         what a column of the row table is
input_batch     tokens and blocks of the rows on the host, and a step's inputs made from them
prompt_outputs  what a request wants of its prompt: log-probabilities, pooled hidden states
profile         what the device does with its time, while somebody wants to know
perplexity      how well a model that was quantized at load still reads a short text
cuda_host       checks of what CUDA and Triton need of the machine, before a model is loaded
device          the runner of a device that computes while the host goes on
model_loader    how a model comes to be on its device, and who computes there
kv_layout       where each layer has its keys and values: KV groups
kv_tiers        keys and values kept beside the KV cache, on disk and in the host's memory
kv_cache_size   how large the KV cache is: pure arithmetic on what was measured
shared_memory   memory that processes share, taken before it is touched
host            what this process may use of its machine: cores, memory, instructions
rotary          the angles of rotary position embedding
checkpoint      what a model is, read from its files; imports no torch
weights         from an opened checkpoint to tensors on a device
parallel        a model on several ranks
models          the models, wired from layers
layers          what a transformer is built of
attention       attention over the paged KV cache
sampling        from logits to token ids
kernels         fused kernels in Triton, each with a reference in torch
cpu             the decoder's step by a small C++ library

The host's side is numpy; torch is imported where it computes (models, layers, attention, kernels, device).
"""

import os

# OpenMP's threads spin while they wait for each other, and a spinning thread takes the core from the very thread that
# it waits for as soon as anything else runs: an event loop, a tokenizer, a second server. With both cores of a small
# machine contended, steps took 3 to 10 times as long. Sleeping costs some microseconds per parallel region. It is read
# when torch is loaded, so it has to be said before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
