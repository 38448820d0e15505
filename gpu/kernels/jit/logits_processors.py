"""Kernels of gpu.kernels.logits_processors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

BLOCK = 1024
# In the scratch: a token that stands in the prompt. Below it is room for the count of a token in the output.
PROMPT_BIT = 1 << 30
# Programs that share the tokens of one row when penalties are applied: fixed, so that a graph fits any length.
PENALTY_CHUNKS = 8


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    if len(rows):
        grid = (triton.cdiv(len(rows), BLOCK),)
        _add_bias[grid](logits, rows, token_ids, values, logits.stride(0), len(rows), BLOCK=BLOCK)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, mask_rows: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows:
        _apply_bitmask[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits, bitmask, mask_rows, logits.stride(0), bitmask.stride(0), vocab_size, BLOCK=BLOCK
        )


def apply_penalties(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    if len(rows):
        grid = (len(rows), PENALTY_CHUNKS)
        sizes = {"BLOCK": BLOCK, "CHUNKS": PENALTY_CHUNKS, "PROMPT_BIT": PROMPT_BIT}
        tokens = (token_ids, columns["num_prompt_tokens"], columns["num_tokens"], token_ids.stride(0))
        counts = (scratch, scratch.stride(0))
        # Two launches, because no count may be taken before all are made.
        _count_tokens[grid](rows, *tokens, *counts, **sizes)
        _penalize[grid](
            logits,
            logits.stride(0),
            rows,
            *tokens,
            *counts,
            columns["repetition_penalty"],
            columns["presence_penalty"],
            columns["frequency_penalty"],
            **sizes,
        )


@triton.jit(do_not_specialize=["count"])
def _add_bias(logits_ptr, rows_ptr, token_ids_ptr, values_ptr, row_stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(rows_ptr + entry, mask=inside, other=-1)
    used = inside & (row >= 0)
    token_id = tl.load(token_ids_ptr + entry, mask=used, other=0)
    value = tl.load(values_ptr + entry, mask=used, other=0.0)
    tl.atomic_add(logits_ptr + row * row_stride + token_id, value, mask=used)


@triton.jit
def _apply_bitmask(logits_ptr, bitmask_ptr, mask_rows_ptr, row_stride, bitmask_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row < 0:
        return
    token_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    word = tl.load(bitmask_ptr + mask_row * bitmask_stride + token_id // 32, mask=inside, other=0)
    forbidden = inside & (((word >> (token_id % 32)) & 1) == 0)
    tl.store(logits_ptr + row * row_stride + token_id, float("-inf"), mask=forbidden)


@triton.jit
def _count_tokens(
    rows_ptr,
    token_ids_ptr,
    num_prompt_tokens_ptr,
    num_tokens_ptr,
    token_ids_stride,
    scratch_ptr,
    scratch_stride,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROMPT_BIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_ptr + row)
    if place < 0:
        return
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + place)
    num_tokens = tl.load(num_tokens_ptr + place)
    for start in range(tl.program_id(1) * BLOCK, num_tokens, CHUNKS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < num_tokens
        token_id = tl.load(token_ids_ptr + place * token_ids_stride + index, mask=inside, other=0)
        count = scratch_ptr + row * scratch_stride + token_id
        tl.atomic_or(count, PROMPT_BIT, mask=inside & (index < num_prompt_tokens))
        tl.atomic_add(count, 1, mask=inside & (index >= num_prompt_tokens))


@triton.jit
def _penalize(
    logits_ptr,
    logits_stride,
    rows_ptr,
    token_ids_ptr,
    num_prompt_tokens_ptr,
    num_tokens_ptr,
    token_ids_stride,
    scratch_ptr,
    scratch_stride,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROMPT_BIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_ptr + row)
    if place < 0:
        return
    num_tokens = tl.load(num_tokens_ptr + place)
    repetition = tl.load(repetition_ptr + place)
    presence = tl.load(presence_ptr + place)
    frequency = tl.load(frequency_ptr + place)
    for start in range(tl.program_id(1) * BLOCK, num_tokens, CHUNKS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < num_tokens
        token_id = tl.load(token_ids_ptr + place * token_ids_stride + index, mask=inside, other=0)
        # Of all the places where a token stands exactly one gets its count; the others get 0 and do nothing.
        taken = tl.atomic_xchg(scratch_ptr + row * scratch_stride + token_id, 0, mask=inside)
        mine = inside & (taken != 0)
        count = (taken & (PROMPT_BIT - 1)).to(tl.float32)
        target = logits_ptr + row * logits_stride + token_id
        value = tl.load(target, mask=mine, other=0.0)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value -= frequency * count + presence * (count > 0).to(tl.float32)
        tl.store(target, value, mask=mine)
