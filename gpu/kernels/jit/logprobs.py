"""Kernel of gpu.kernels.logprobs: one program per row, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def row_statistics(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    log_sum = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    chosen = torch.empty_like(log_sum)
    greater = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        _row_statistics[(num_rows,)](
            log_sum, chosen, greater, logits, token_ids, logits.stride(0), vocab_size, BLOCK=block, num_warps=8
        )
    return log_sum, chosen, greater


@triton.jit
def _row_statistics(
    log_sum_ptr, chosen_ptr, greater_ptr, logits_ptr, token_ids_ptr, row_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    # Every lane has its own running maximum and sum, so that a tile needs no reduction.
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    greater = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_id = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
        greater += (x > chosen).to(tl.int32)
        raised = tl.maximum(highest, x)
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        total = total * tl.exp(highest - shift) + tl.exp(x - shift)
        highest = raised
    top = tl.max(highest)
    total = tl.sum(total * tl.exp(highest - tl.where(top == float("-inf"), 0.0, top)))
    tl.store(log_sum_ptr + row, top + tl.log(total))
    tl.store(chosen_ptr + row, chosen)
    tl.store(greater_ptr + row, tl.sum(greater).to(tl.int64))
