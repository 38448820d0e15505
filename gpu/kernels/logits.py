"""Bias, penalties and token masks, which change logits before a token is drawn, and log-probabilities of raw logits.

The first three work in place, touch only what they change, and may run in any step. Bias and penalties want float32
logits: make a copy of that type in the steps that use them, and none in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gpu.kernels.dispatch import on_triton, tl, triton

BLOCK = 1024
# A bit of a scratch word: the token is in the prompt. The bits below count the token in the output.
PROMPT_BIT = 1 << 30
# Programs that share the tokens of one row when penalties are applied: fixed, so that a graph fits any length.
PENALTY_CHUNKS = 8
STATISTICS_BLOCK = 4096


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values[n]` (float32) to `logits[rows[n], token_ids[n]]`; all [N], the indices int64.

    `logits` is float32 [S, vocab]. An entry may come twice (a stop token with a bias); entries with a negative row are
    padding. -inf forbids a token. The order of additions to one logit is not fixed, but there are at most two.
    """
    if not on_triton(logits):
        used = rows >= 0
        logits.index_put_((rows[used], token_ids[used]), values[used], accumulate=True)
    elif len(rows):
        grid = (triton.cdiv(len(rows), BLOCK),)
        _add_bias[grid](logits, rows, token_ids, values, logits.stride(0), len(rows), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _add_bias(logits_ptr, rows_ptr, token_ids_ptr, values_ptr, row_stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(rows_ptr + entry, mask=inside, other=-1)
    used = inside & (row >= 0)
    token_id = tl.load(token_ids_ptr + entry, mask=used, other=0)
    value = tl.load(values_ptr + entry, mask=used, other=0.0)
    tl.atomic_add(logits_ptr + row * row_stride + token_id, value, mask=used)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """Set every logit to -inf for which the bit is 0, because a grammar does not allow its token.

    `logits` is [S, vocab], of any float dtype. Bit t % 32 of word t // 32 in a row of `bitmask` (int32
    [M, >= ceil(vocab / 32)], as llguidance and xgrammar fill it) stands for token t. `mask_rows` (int64 [S]) has
    the row of the bitmask for each row of logits; -1 is none, and costs nothing.
    """
    num_rows, vocab_size = logits.shape
    if not on_triton(logits):
        for row, mask_row in enumerate(mask_rows.tolist()):
            if mask_row >= 0:
                bits = bitmask[mask_row].unsqueeze(1) >> torch.arange(32, dtype=torch.int32) & 1
                logits[row].masked_fill_(bits.flatten()[:vocab_size] == 0, float("-inf"))
    elif num_rows:
        _apply_bitmask[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits, bitmask, mask_rows, logits.stride(0), bitmask.stride(0), vocab_size, BLOCK=BLOCK
        )


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


def apply_penalties(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    *,
    scratch: torch.Tensor,
) -> None:
    """Penalize tokens of prompts and outputs in `logits`, float32 [S, vocab], as `gpu.sampling.logits` does.

    `columns` are those of the row table on the device: the penalties and the lengths of prompt and row, [max_num_seqs]
    each; `token_ids` is int32 [max_num_seqs, max_len], prompt and output. `rows` (int64 [S]) are indices into them, -1
    is a row without penalties.

    No count of a row's tokens is kept between steps: tokens are counted into `scratch` (int32 [>= S, vocab], zeros, and
    zeros again at the end) by atomic additions of integers, which give the same in any order, and the program that
    takes a count out of it applies it. The work grows with the number of tokens, not with the vocabulary.
    """
    if not on_triton(logits):
        apply_penalties_reference(logits, columns, token_ids, rows)
    elif len(rows):
        grid = (len(rows), PENALTY_CHUNKS)
        sizes = {"BLOCK": BLOCK, "CHUNKS": PENALTY_CHUNKS, "PROMPT_BIT": PROMPT_BIT}
        tokens = (token_ids, columns["num_prompt_tokens"], columns["num_tokens"], token_ids.stride(0))
        counts = (scratch, scratch.stride(0))
        # Two launches, because no count may be taken before all tokens are counted.
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


def apply_penalties_reference(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], token_ids: torch.Tensor, rows: torch.Tensor
) -> None:
    """Do the work of `apply_penalties` in torch, without the scratch."""
    for row, place in enumerate(rows.tolist()):
        if place < 0:
            continue
        at = {name: column[place] for name, column in columns.items()}
        tokens = token_ids[place, : int(at["num_tokens"])].long()
        seen = tokens.unique()
        counts = torch.bincount(tokens[int(at["num_prompt_tokens"]) :], minlength=logits.shape[1])[seen].float()
        values = logits[row, seen]
        repetition = at["repetition_penalty"]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row, seen] = values - at["frequency_penalty"] * counts - at["presence_penalty"] * (counts > 0)


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
        # Exactly one of the positions that hold a token gets its count; the others get 0 and do nothing.
        taken = tl.atomic_xchg(scratch_ptr + row * scratch_stride + token_id, 0, mask=inside)
        mine = inside & (taken != 0)
        count = (taken & (PROMPT_BIT - 1)).to(tl.float32)
        target = logits_ptr + row * logits_stride + token_id
        value = tl.load(target, mask=mine, other=0.0)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value -= frequency * count + presence * (count > 0).to(tl.float32)
        tl.store(target, value, mask=mine)


class LogprobTensors(NamedTuple):
    """The log-probabilities of S rows, on the device."""

    chosen: torch.Tensor  # float32 [S], of the token drawn
    ranks: torch.Tensor  # int64 [S], one more than the number of tokens with a strictly greater logit
    top_ids: torch.Tensor  # int64 [S, num_top]
    top: torch.Tensor  # float32 [S, num_top], descending


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Return the log-probabilities of int64 [S] tokens and, in each row, of the `num_top` most likely tokens.

    `logits` are raw, before bias, penalties and temperature: [S, vocab], any float dtype. No tensor of that size is
    made.
    """
    log_sum, chosen, greater = (_launch_row_statistics if on_triton(logits) else row_statistics_reference)(
        logits, token_ids
    )
    # torch selects these few by radix, without sorting a row.
    top = logits.topk(num_top)
    return LogprobTensors(chosen - log_sum, greater + 1, top.indices, top.values.float() - log_sum.unsqueeze(1))


def row_statistics_reference(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's log-sum-exp, the logit of its token, and how many are greater: float32, float32, int64 [S]."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    return logits.logsumexp(-1), chosen.squeeze(1), (logits > chosen).sum(-1)


def _launch_row_statistics(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    log_sum = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    chosen = torch.empty_like(log_sum)
    greater = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(STATISTICS_BLOCK, triton.next_power_of_2(vocab_size))
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
