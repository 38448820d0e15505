"""What changes logits before a token is drawn: bias, penalties, and the tokens that a grammar allows.

All work in place, touch only what they change, and may run in any step. Bias and penalties want float32 logits: make a
copy of that type in the steps that use them, and none in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.kernels.dispatch import on_triton

# In the scratch table: a token that stands in the prompt. Below it is room for the count of a token in the output.
PROMPT_BIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PenaltyTable:
    """Parameters and tokens by stable row: columns [max_num_seqs] on the device."""

    repetition: torch.Tensor  # float32; 1 is off
    presence: torch.Tensor  # float32; 0 is off
    frequency: torch.Tensor  # float32; 0 is off
    token_ids: torch.Tensor  # int32 [max_num_seqs, max_len], prompt and output
    num_prompt_tokens: torch.Tensor  # int32
    num_tokens: torch.Tensor  # int32, prompt and output
    # int32 [rows at once, vocab], zeros; zeros again when `apply_penalties` returns. It has room for as many rows of
    # logits as are ever penalized together.
    scratch: torch.Tensor


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values[n]` (float32) to `logits[rows[n], token_ids[n]]`; all [N], the indices int64.

    `logits` is float32 [S, vocab]. An entry may come twice (a stop token with a bias); entries with a negative row are
    padding. -inf forbids a token. The order of additions to one logit is not fixed, which with two does not matter.
    """
    if on_triton(logits):
        from gpu.kernels.jit import logits_processors

        logits_processors.add_bias(logits, rows, token_ids, values)
    else:
        used = rows >= 0
        logits.index_put_((rows[used], token_ids[used]), values[used], accumulate=True)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """Forbid what a grammar does not allow: set to -inf every logit whose bit is 0.

    `logits` is [S, vocab], of any float dtype. Bit t % 32 of word t // 32 in a row of `bitmask` (int32
    [M, >= ceil(vocab / 32)], as llguidance and xgrammar fill it) stands for token t. `mask_rows` (int64 [S]) says which
    row of the bitmask is for which row of logits; -1 is none, and costs nothing.
    """
    if on_triton(logits):
        from gpu.kernels.jit import logits_processors

        logits_processors.apply_bitmask(logits, bitmask, mask_rows)
    else:
        for row, mask_row in enumerate(mask_rows.tolist()):
            if mask_row >= 0:
                bits = bitmask[mask_row].unsqueeze(1) >> torch.arange(32, dtype=torch.int32) & 1
                logits[row].masked_fill_(bits.flatten()[: logits.shape[1]] == 0, float("-inf"))


def apply_penalties(logits: torch.Tensor, table: PenaltyTable, rows: torch.Tensor) -> None:
    """Penalize what the requests have seen, in `logits`, float32 [S, vocab].

    `rows` (int64 [S]) are the places in the table; -1 is a row without penalties. Repetition divides the positive and
    multiplies the negative logits of every token in prompt or output (Keskar et al., CTRL, 2019, and Hugging Face's
    processor of that name). Presence and frequency, then, are OpenAI's: over the output alone,
    `logit -= frequency * count + presence * (count > 0)`.

    No count of a row's tokens is kept between steps: tokens are counted into the scratch table by atomic additions of
    integers, which give the same in any order, and whoever takes a count out of it applies it. The work follows the
    number of tokens, not the vocabulary.
    """
    if on_triton(logits):
        from gpu.kernels.jit import logits_processors

        logits_processors.apply_penalties(logits, table, rows)
    else:
        apply_penalties_reference(logits, table, rows)


def apply_penalties_reference(logits: torch.Tensor, table: PenaltyTable, rows: torch.Tensor) -> None:
    """`apply_penalties` in torch; it needs no scratch."""
    for row, place in enumerate(rows.tolist()):
        if place < 0:
            continue
        num_prompt, num_tokens = int(table.num_prompt_tokens[place]), int(table.num_tokens[place])
        token_ids = table.token_ids[place, :num_tokens].long()
        seen = token_ids.unique()
        counts = torch.bincount(token_ids[num_prompt:], minlength=logits.shape[1])[seen].float()
        values = logits[row, seen]
        repetition = table.repetition[place]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row, seen] = values - table.frequency[place] * counts - table.presence[place] * (counts > 0)
