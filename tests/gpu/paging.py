"""Steps of a model by hand: metadata from lengths and block ids, without a scheduler or a model runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu.attention import AttentionMetadata


@dataclass(frozen=True)
class Span:
    """What one request does in a step: its last `query_len` tokens of `seq_len`, whose cache is `blocks`."""

    query_len: int
    seq_len: int
    blocks: Sequence[int]


def make_group_metadata(spans: Sequence[Span], block_size: int, num_groups: int) -> list[AttentionMetadata]:
    """Of each KV group: a span's block i is their blocks from i * num_groups on."""
    return [
        make_metadata(
            [replace(span, blocks=[block * num_groups + group for block in span.blocks]) for span in spans], block_size
        )
        for group in range(num_groups)
    ]


def make_metadata(spans: Sequence[Span], block_size: int, window: int | None = None) -> AttentionMetadata:
    """The metadata of one step. Requests with one query must come first if they are to count as decodes.

    Unused entries of the block table, those behind the window of all queries too, are wild on purpose: whoever reads
    one fails loudly.
    """
    query_lens = [span.query_len for span in spans]
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(spans))
    width = max(len(span.blocks) for span in spans) + 1
    block_table = torch.full((len(spans), width), 2**30, dtype=torch.int32)
    slots: list[int] = []
    for i, span in enumerate(spans):
        used = -(-span.seq_len // block_size)
        behind = 0 if window is None else max(0, span.seq_len - span.query_len + 1 - window) // block_size
        block_table[i, behind:used] = torch.tensor(span.blocks[behind:used], dtype=torch.int32)
        slots += [
            span.blocks[position // block_size] * block_size + position % block_size
            for position in range(span.seq_len - span.query_len, span.seq_len)
        ]
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor([span.seq_len for span in spans], dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_decodes=num_decodes,
        query_lens_list=query_lens,
        seq_lens_list=[span.seq_len for span in spans],
    )


def positions_of(spans: Sequence[Span]) -> torch.Tensor:
    """int64 [T]"""
    return torch.cat([torch.arange(span.seq_len - span.query_len, span.seq_len) for span in spans])
