"""Memory of a CUDA device: how much of it the KV cache may have. Used by the worker."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch

from gpu.device.choices import choose_kernels
from gpu.device.rehearsal import graph_memory, rehearse
from gpu.device.runner import make_device_runner
from gpu.kv_cache_size import check_max_model_len
from gpu.kv_layout import kv_layout
from gpu.model_loader import WorkerOptions
from gpu.models.served import TorchModel
from gpu.rows import BatchSizes


def kv_cache_budget(model: TorchModel, options: WorkerOptions) -> int:
    """Bytes that the KV cache may take, with the weights in place. A runner with a cache of one block finds out what
    steps, tables and graphs take, and compiles what they need."""
    choose_kernels(model, options.block_size)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    resident = torch.cuda.memory_allocated(model.device)
    longest = check_max_model_len(model.model.config, options.max_model_len)
    num_groups = kv_layout(model.model.config).num_groups
    sizes = BatchSizes(options.max_num_seqs, longest, options.block_size, num_groups)
    runner = make_device_runner(model, 1, sizes, options.max_num_batched_tokens)
    rehearse(runner, sizes, options.max_num_batched_tokens, model.model.config.vocab_size)
    steps = torch.cuda.max_memory_allocated(model.device) - resident
    graphs = graph_memory(runner, lambda: torch.cuda.mem_get_info(model.device)[0])
    torch.cuda.synchronize(model.device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(options.gpu_memory_utilization * total) - (total - free) - steps - graphs


def synchronize(device: str) -> None:
    """Wait for all that was started. A device that is broken says so here too, and nobody cares any more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(torch.device(device))


def release() -> None:
    """Give back what torch keeps for later."""
    torch.cuda.empty_cache()


def device_name(device: str) -> str:
    """The model of a CUDA device."""
    return torch.cuda.get_device_name(device)
