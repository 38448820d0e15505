"""The worker: one device with its model, its KV cache and the runner that uses them.

Made by an executor, in the thread that will run the steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

from gpu.attention import AttentionMetadata
from gpu.checkpoint import ModelConfig
from gpu.columns import make_columns
from gpu.device import CudaGraphs, DeviceRunner
from gpu.kv_cache_size import CPU_MEMORY_LIMIT, CPU_MEMORY_SHARE, check_max_model_len, check_memory, kv_cache_size
from gpu.model_loader import PagedModel, WorkerOptions, free_memory, load_model, resolve_device
from gpu.model_runner import ModelRunner
from gpu.rows import COLUMNS, BatchSizes
from gpu.runner import Runner
from gpu.sampling import SamplingMetadata, sample
from gpu.weights import Weight


class Worker:
    """Loads on construction, which takes seconds to minutes; raises ConfigError where the options cannot work."""

    def __init__(self, config: ModelConfig, weights: Iterable[tuple[str, Weight]], options: WorkerOptions) -> None:
        self.device = resolve_device(options.device)
        loaded = load_model(config, weights, options, self.device)
        model = loaded.model
        self.dtype = loaded.dtype
        self.weight_forms = loaded.weight_forms
        gc.collect()  # the readers' maps and buffers, before memory is measured

        self.kv_cache_size = kv_cache_size(
            config,
            element_size=self.dtype.itemsize,
            block_size=options.block_size,
            tokens_held=loaded.tokens_held,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            budget=self._kv_cache_budget(model, config, options),
            kv_cache_memory=options.kv_cache_memory,
        )
        model.set_max_model_len(self.kv_cache_size.max_model_len)
        self.runner = self._make_runner(model, config, options)
        # How many steps should be on their way at once: more than one where a step runs on by itself.
        self.pipeline_depth = 2 if self.device.type == "cuda" else 1

    def shutdown(self) -> None:
        """Give model and cache back, when the steps in flight are over. The last thing that is asked of a worker."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device that is broken says so here too, and nobody cares any more
                torch.cuda.synchronize(self.device)
        del self.runner
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_runner(self, model: PagedModel, config: ModelConfig, options: WorkerOptions) -> Runner:
        on_cuda = self.device.type == "cuda"
        kv_caches = model.allocate_kv_cache(self.kv_cache_size.num_blocks, self.dtype, self.device)
        sizes = BatchSizes(options.max_num_seqs, self.kv_cache_size.max_model_len, options.block_size)
        if options.runner == "host" or (options.runner == "auto" and not on_cuda):
            return ModelRunner(model, kv_caches, sizes, self.device)
        graphs = CudaGraphs(self.device) if on_cuda else None
        return DeviceRunner(
            model,
            kv_caches,
            sizes,
            self.device,
            vocab_size=config.vocab_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            graphs=graphs,
        )

    def _kv_cache_budget(self, model: PagedModel, config: ModelConfig, options: WorkerOptions) -> int:
        """Bytes that the KV cache may take, with the weights in place. Raises ConfigError if more was asked for."""
        if options.kv_cache_memory is not None:
            check_memory(options.kv_cache_memory, free_memory(self.device))
            return options.kv_cache_memory
        if self.device.type == "cpu":
            return int(min(CPU_MEMORY_SHARE * free_memory(self.device), CPU_MEMORY_LIMIT) * options.kv_cache_share)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        _largest_step(model, config, options, self.dtype, self.device)
        activations = torch.cuda.max_memory_allocated(self.device) - resident
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(options.gpu_memory_utilization * total) - (total - free) - activations


@torch.inference_mode()
def _largest_step(
    model: PagedModel,
    config: ModelConfig,
    options: WorkerOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run what takes the most memory: one prefill of the whole token budget, then a filtered draw of a full batch.

    One block of cache stands in for all of them; the values that overwrite each other there do not matter.
    """
    num_tokens = min(options.max_num_batched_tokens, check_max_model_len(config, options.max_model_len))
    num_rows = options.max_num_seqs
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.zeros((1, -(-num_tokens // options.block_size)), dtype=torch.int32, device=device),
        slot_mapping=torch.arange(num_tokens, device=device) % options.block_size,
        num_decodes=int(num_tokens == 1),
        query_lens_list=[num_tokens],
        seq_lens_list=[num_tokens],
    )
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    hidden = model.forward(tokens, positions, metadata, model.allocate_kv_cache(1, dtype, device))
    logits = model.compute_logits(hidden[:1].expand(num_rows, -1))
    columns = make_columns(COLUMNS, num_rows)
    columns["temperature"][:], columns["top_p"][:] = 1.0, 0.999
    rows = np.arange(num_rows)
    sample(logits, SamplingMetadata(columns=columns, rows=rows, positions=rows))
