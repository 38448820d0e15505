"""Memory of a CUDA device: how much of it the KV cache may have. Used by the worker."""

from __future__ import annotations

from contextlib import suppress

import torch

from gpu.attention import AttentionMetadata
from gpu.device.tables import device_columns
from gpu.kernels import sample_tokens
from gpu.kv_cache_size import check_max_model_len
from gpu.model_loader import WorkerOptions
from gpu.models.served import TorchModel


def kv_cache_budget(model: TorchModel, options: WorkerOptions) -> int:
    """Bytes that the KV cache may take, with the weights in place."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    resident = torch.cuda.memory_allocated(model.device)
    _largest_step(model, options)
    activations = torch.cuda.max_memory_allocated(model.device) - resident
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(options.gpu_memory_utilization * total) - (total - free) - activations


def synchronize(device: str) -> None:
    """Wait for all that was started. A device that is broken says so here too, and nobody cares any more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(torch.device(device))


def release() -> None:
    """Give back what torch keeps for later."""
    torch.cuda.empty_cache()


@torch.inference_mode()
def _largest_step(served: TorchModel, options: WorkerOptions) -> None:
    """Run what takes the most memory: one prefill of the whole token budget, then a filtered draw of a full batch.

    One block of cache stands in for all of them; the values that overwrite each other there do not matter.
    """
    model, device = served.model, served.device
    num_tokens = min(options.max_num_batched_tokens, check_max_model_len(model.config, options.max_model_len))
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
    hidden = model.forward(tokens, positions, metadata, model.allocate_kv_cache(1, served.dtype, device))
    logits = model.compute_logits(hidden[:1].expand(num_rows, -1))
    columns = {name: column.to(device) for name, column in device_columns(num_rows).items()}
    columns["temperature"].fill_(1.0)
    columns["top_p"].fill_(0.999)
    rows = torch.arange(num_rows, device=device)
    sample_tokens(logits, columns, rows, rows)
