"""Attention of whole prompts, in which each token sees the tokens before it and after it: that of encoders.

Queries, keys and values of a step stay where its projection wrote them. To the prefill kernel they are a cache with
blocks of one token, so it needs no padding and no copy.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gpu.checkpoint.architecture import Heads
from gpu.kernels.dispatch import on_triton
from gpu.kernels.prefill import paged_prefill, rows_per_block

ALL = 2**30  # more tokens than any prompt has
_QUERIES_AT_ONCE = 512  # of the reference with a reach, so that its mask stays small


class WholePrompts(NamedTuple):
    """The prompts of one step, the same for all layers: `tables` for the kernel, or `groups` for the reference."""

    groups: list[torch.Tensor]  # for each length the tokens of its prompts, int64 [prompts, length]
    block_rows: int = 0
    # int32: the tokens of each prompt [B, longest], lengths [B], `query_start_loc` [B + 1], `AttentionWork.blocks`
    tables: tuple[torch.Tensor, ...] = ()


def whole_prompts(query_start_loc: NDArray[np.int32], query: torch.Tensor, heads: Heads) -> WholePrompts:
    """Return the prompts of a step with `query_start_loc`, [B + 1]. Only type and device of `query` are used."""
    starts, lengths = query_start_loc[:-1], np.diff(query_start_loc)
    if not on_triton(query):
        found: dict[int, list[int]] = defaultdict(list)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            found[length].append(start)
        groups = [torch.tensor(first)[:, None] + torch.arange(length) for length, first in found.items()]
        return WholePrompts([each.to(query.device) for each in groups])
    group = heads.query // heads.kv
    block_rows = rows_per_block(query.new_empty(0, heads.query, heads.dim), group, None)
    counts = -(-lengths // (block_rows // group))
    before = np.repeat(np.cumsum(counts) - counts, counts)
    firsts = (np.arange(counts.sum()) - before) * (block_rows // group)
    arrays = (
        starts[:, None] + np.arange(lengths.max()),
        lengths,
        query_start_loc,
        np.stack((np.repeat(np.arange(len(counts)), counts), firsts, 0 * firsts, 0 * firsts + 1), 1),
    )
    return WholePrompts(
        [], block_rows, tuple(torch.from_numpy(each.astype(np.int32)).to(query.device) for each in arrays)
    )


def whole_attention(qkv: torch.Tensor, heads: Heads, prompts: WholePrompts, reach: int | None) -> torch.Tensor:
    """Return the attention of each token to those of its prompt that are at most `reach` positions away; None: to all.

    `qkv` has queries, keys and values side by side, [T, heads, dim]. The result is [T, query heads, dim].
    """
    query, key_value = qkv.split((heads.query, 2 * heads.kv), 1)
    out = qkv.new_empty(query.shape)
    if prompts.tables:
        table, lengths, starts, blocks = prompts.tables
        cache = key_value.unflatten(1, (2, heads.kv)).unsqueeze(3)  # [blocks, 2, KV heads, 1, dim]
        window, ahead = (None, ALL) if reach is None else (reach + 1, reach)
        paged_prefill(
            *(query, cache, table, lengths, starts, blocks, prompts.block_rows, out),
            *(heads.scale, window, None, None, ahead),
        )
        return out
    key, value = (each.repeat_interleave(heads.query // heads.kv, 1) for each in key_value.split(heads.kv, 1))
    for tokens in prompts.groups:
        q, k, v = (each[tokens].transpose(1, 2) for each in (query, key, value))
        out[tokens] = _attend(q, k, v, reach, heads.scale).transpose(1, 2)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: int | None, scale: float) -> torch.Tensor:
    """Return the attention of prompts of one length, all [prompts, heads, length, dim]."""
    attend, length = functional.scaled_dot_product_attention, q.shape[2]
    if reach is None or reach >= length - 1:
        return attend(q, k, v, scale=scale)
    outputs = []
    for start in range(0, length, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, length)
        keys = slice(max(0, start - reach), min(stop + reach, length))
        rows, columns = (torch.arange(each.start, each.stop, device=q.device) for each in (slice(start, stop), keys))
        mask = (rows[:, None] - columns).abs() <= reach
        outputs.append(attend(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale))
    return torch.cat(outputs, 2)
