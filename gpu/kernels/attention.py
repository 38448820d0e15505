"""Attention over the paged KV cache, in the layout of `gpu.kernels.rope`. Called by gpu.attention.

What is promised, of kernels and reference:

- Only slots of a request's own tokens are read, never one past its length or behind the window of all its queries: free
  blocks may hold anything, NaN included.
- Entries of `block_table` that stand for others may be anything and are not used.
- A request with one query and length 0 (padding of a graph) reads nothing and gets zeros; one without queries is left
  alone, and so are rows that belong to no request.
- A request's result does not depend on the others in the batch, but for where its keys are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.kernels.dispatch import on_triton


class AttentionWork(NamedTuple):
    """Which program does what in one step: the same for all layers with heads of one kind. Entries that begin with -1
    are for nobody."""

    parts: torch.Tensor  # int32 [P, 4], of decodes: request, number of the part, of how many, length of the request
    part_starts: torch.Tensor  # int32 [B + 1]
    blocks: torch.Tensor  # int32 [Q, 2], of chunks: request, and its first query that the program takes
    block_rows: int  # of a program that takes a block: queries times the heads that share a KV head


def list_attention_work(
    query: torch.Tensor,
    num_kv_heads: int,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    window: int | None = None,
    num_decodes: int | None = None,
    longest_chunk: int | None = None,
) -> AttentionWork | None:
    """The work of a step for `paged_attention`, whose arguments have the same names; None where no kernel runs.

    Of `query` only shape and dtype count. Of the B requests those with one query come first. How many they are,
    `num_decodes`, and the most queries that another has need not be known on the host.
    """
    if not on_triton(query):
        return None
    from gpu.kernels.jit import prefill, work_lists

    num_tokens, num_heads, _ = query.shape
    num_chunks = len(seq_lens) - (num_decodes or 0)
    group = num_heads // num_kv_heads
    block_rows = prefill.rows_per_block(query, group, longest_chunk)
    block_q = block_rows // group
    # A chunk has two queries or more, and one block that is not full.
    max_blocks = num_tokens // block_q + min(num_chunks, num_tokens // 2) if num_chunks else 0
    lists = work_lists.list_work(seq_lens, query_start_loc, num_kv_heads, window, max_blocks, block_q)
    return AttentionWork(*lists, block_rows)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    work: AttentionWork | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of each of B requests, causally, over all keys before them, cached or of this step.

    `query` is [T, num_heads, head_dim]; those of request i are the rows from `query_start_loc[i]` to
    `query_start_loc[i + 1]` (int32 [B + 1]), and those with one query, the decodes, come first. `block_table` is int32
    [B, max_blocks], `seq_lens` int32 [B], all tokens of a request; `out` is of the query's shape and dtype. `window` is
    how many tokens a query sees, itself included, and `softcap` makes of a score softcap * tanh(score / softcap).
    `sinks`, float32 [num_heads], are scores beside the tokens' that have no value. A chunk of a prompt and a prompt
    behind a cached prefix are the same thing: fewer queries than keys. `work` is that of `list_attention_work`; a
    decode is cut by it into parts, which are merged by their log-sum-exp. What `num_decodes` excludes is not even
    started.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if work is None:
        attend_reference(query, kv_cache, block_table, seq_lens, query_start_loc, out, scale, window, softcap, sinks)
        return out
    from gpu.kernels.jit import decode, prefill

    if num_decodes != 0:
        lists = (work.parts, work.part_starts)
        decode.paged_decode(query, kv_cache, block_table, *lists, out, scale, window, softcap, sinks)
    if len(work.blocks):
        tables = (kv_cache, block_table, seq_lens, query_start_loc)
        prefill.paged_prefill(query, *tables, work.blocks, work.block_rows, out, scale, window, softcap, sinks)
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
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`paged_attention` in torch, request by request: scores, mask, softmax, in float32 or better."""
    precise = torch.promote_types(query.dtype, torch.float32)
    block_size = kv_cache.shape[3]
    group_size = query.shape[1] // kv_cache.shape[2]
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if length == 0:
            out[rows] = 0
            continue
        num_queries = int(starts[i + 1] - starts[i])
        behind = 0 if window is None else max(0, length - num_queries + 1 - window) // block_size  # blocks nobody sees
        blocks = block_table[i, behind : -(-length // block_size)].long()
        seen_from = behind * block_size
        kv = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - seen_from].to(precise)
        key, value = kv.repeat_interleave(group_size, dim=1)  # each [num_heads, length, head_dim]
        scores = query[rows].to(precise).transpose(0, 1) @ key.transpose(1, 2) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        last = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1)
        position = torch.arange(seen_from, length, device=query.device)
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(precise).view(-1, 1, 1).expand(-1, num_queries, 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[1]]
        out[rows] = (weights @ value).transpose(0, 1).to(out.dtype)
