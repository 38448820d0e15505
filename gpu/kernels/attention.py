"""Attention over the paged KV cache, in the layout of `gpu.kernels.rope`. Called by gpu.attention.triton_backend.

What is promised, of both functions and their references:

- Only slots of a request's own tokens are read, never one past its length: free blocks may hold anything, NaN included.
- Entries of `block_table` past a request's length may be anything and are not used.
- A request of length 0 (padding of a graph) reads nothing and gets zeros.
- A request's result does not depend on the others in the batch, but for the number of splits (`paged_decode`).
"""

from __future__ import annotations

import torch

from gpu.kernels.dispatch import on_triton


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """One query of each of B requests, the last of its `seq_lens` tokens, over all its keys.

    `query` is [B, num_heads, head_dim], `block_table` int32 [B, max_blocks], `seq_lens` int32 [B]; B rows of `out`, of
    the query's shape and dtype, are written and returned. `window` is how many tokens a query sees, itself included.
    Each request is cut into up to `num_splits` parts of its length, which are merged by their log-sum-exp; by default
    as many as fill the device, a number that depends on shapes alone.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if on_triton(query):
        from gpu.kernels.jit import decode

        decode.paged_decode(query, kv_cache, block_table, seq_lens, out, scale, window, num_splits)
    else:
        starts = torch.arange(len(seq_lens) + 1)
        attend_reference(query, kv_cache, block_table, seq_lens, starts, out, scale, window)
    return out


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of each of B requests, causally, over all keys before them, cached or of this step.

    `query` is [T, num_heads, head_dim]; those of request i are the rows from `query_start_loc[i]` to
    `query_start_loc[i + 1]` (int32 [B + 1]; it need not begin at 0, and rows that belong to no request are left alone).
    All else is as for `paged_decode`. A chunk of a prompt and a prompt behind a cached prefix are the same thing:
    fewer queries than keys.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if on_triton(query):
        from gpu.kernels.jit import prefill

        prefill.paged_prefill(query, kv_cache, block_table, seq_lens, query_start_loc, out, scale, window)
    else:
        attend_reference(query, kv_cache, block_table, seq_lens, query_start_loc, out, scale, window)
    return out


def attend_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Both functions in torch, request by request: scores, mask, softmax, in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    block_size = kv_cache.shape[3]
    group_size = query.shape[1] // kv_cache.shape[2]
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if length == 0:
            out[rows] = 0
            continue
        blocks = block_table[i, : -(-length // block_size)].long()
        kv = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].to(precise)
        key, value = kv.repeat_interleave(group_size, dim=1)  # each [num_heads, length, head_dim]
        scores = query[rows].to(precise).transpose(0, 1) @ key.transpose(1, 2) * scale
        last = torch.arange(length - scores.shape[1], length, device=query.device).unsqueeze(1)
        position = torch.arange(length, device=query.device)
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        scores.masked_fill_(hidden, float("-inf"))
        out[rows] = (scores.softmax(-1) @ value).transpose(0, 1).to(out.dtype)
