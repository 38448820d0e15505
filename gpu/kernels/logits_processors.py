"""What changes logits before a token is drawn: bias, penalties, and the tokens that a grammar allows.

All work in place, touch only what they change, and may run in any step. Bias and penalties want float32 logits: make a
copy of that type in the steps that use them, and none in the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu.kernels.dispatch import on_triton


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


def apply_penalties(
    logits: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    *,
    scratch: torch.Tensor,
) -> None:
    """Penalize what the requests have seen, in `logits`, float32 [S, vocab].

    `columns` are those of the row table on the device: the penalties and the lengths of prompt and row, [max_num_seqs]
    each; `token_ids` is int32 [max_num_seqs, max_len], prompt and output. `rows` (int64 [S]) are places in them, -1 is
    a row without penalties. Repetition divides the positive and multiplies the negative logits of every token in prompt
    or output (Keskar et al., CTRL, 2019, and Hugging Face's processor of that name). Presence and frequency, then, are
    OpenAI's: over the output alone, `logit -= frequency * count + presence * (count > 0)`.

    No count of a row's tokens is kept between steps: tokens are counted into `scratch` (int32 [>= S, vocab], zeros, and
    zeros again at the end) by atomic additions of integers, which give the same in any order, and whoever takes a count
    out of it applies it. The work follows the number of tokens, not the vocabulary.
    """
    if on_triton(logits):
        from gpu.kernels.jit import logits_processors

        logits_processors.apply_penalties(logits, columns, token_ids, rows, scratch)
    else:
        apply_penalties_reference(logits, columns, token_ids, rows)


def apply_penalties_reference(
    logits: torch.Tensor, columns: Mapping[str, torch.Tensor], token_ids: torch.Tensor, rows: torch.Tensor
) -> None:
    """`apply_penalties` in torch; it needs no scratch."""
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
