"""A step's inputs, made on the device out of its rows. Used by the runner.

Nothing here waits for the device, and no shape depends on what it holds. Indices are int64, as torch wants them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.attention import AttentionMetadata
from gpu.device.rows import StepShape
from gpu.device.tables import DeviceTables


class StepInputs(NamedTuple):
    """B requests, T tokens, S rows that sample."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: AttentionMetadata
    rows: torch.Tensor  # int64 [B]
    seq_lens: torch.Tensor  # int32 [B]
    logits_indices: torch.Tensor | None  # int64 [S], into the T; None where all T sample, in order
    sampling_rows: torch.Tensor  # int64 [S]


def decode_inputs(tables: DeviceTables, size: int) -> StepInputs:
    """Of a step in which `size` places of `batch_rows` decode, some of them padding: shapes follow from `size` alone.

    Padding has length 0 and slot -1, which the kernels leave alone. The lengths on the host stay unknown.
    """
    rows = tables.batch_rows[:size].long()
    is_padding = rows == tables.padding_row
    positions = tables.num_computed_tokens[rows].long()
    seq_lens = (positions + 1).masked_fill_(is_padding, 0).int()
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=tables.device),
        seq_lens=seq_lens,
        block_table=tables.block_table.index_select(0, rows),
        slot_mapping=_slots(tables, rows, positions).masked_fill_(is_padding, -1),
        num_decodes=size,
        query_lens_list=[1] * size,
        seq_lens_list=[],
    )
    input_ids = tables.token_ids[rows, positions].long()
    return StepInputs(input_ids, positions, metadata, rows, seq_lens, None, rows)


def mixed_inputs(tables: DeviceTables, shape: StepShape) -> StepInputs:
    """Of any step, without padding."""
    num_requests, num_tokens = len(shape.rows), int(shape.query_start_loc[-1])
    rows = tables.batch_rows[:num_requests].long()
    query_lens = tables.query_lens[:num_requests].long()
    starts = torch.zeros(num_requests + 1, dtype=torch.int64, device=tables.device)
    torch.cumsum(query_lens, 0, out=starts[1:])
    first = tables.num_computed_tokens[rows].long()
    seq_lens = (first + query_lens).int()

    # Token t of request i stands at position first[i] + (t - starts[i]).
    places = torch.repeat_interleave(query_lens, output_size=num_tokens)
    token_rows = rows[places]
    positions = torch.arange(num_tokens, device=tables.device) + (first - starts[:-1])[places]
    num_blocks = -(-int(shape.seq_lens.max()) // tables.block_size)
    metadata = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=seq_lens,
        block_table=tables.block_table[:, :num_blocks].index_select(0, rows),
        slot_mapping=_slots(tables, token_rows, positions),
        num_decodes=shape.num_decodes,
        query_lens_list=shape.query_lens.tolist(),
        seq_lens_list=shape.seq_lens.tolist(),
    )
    samples = tables.samples[: len(shape.samples)].long()
    return StepInputs(
        input_ids=tables.token_ids[token_rows, positions].long(),
        positions=positions,
        metadata=metadata,
        rows=rows,
        seq_lens=seq_lens,
        logits_indices=starts[1:][samples] - 1,
        sampling_rows=rows[samples],
    )


def advance(tables: DeviceTables, inputs: StepInputs, token_ids: torch.Tensor) -> None:
    """Record a step: all its tokens are computed, and `token_ids` (int64 [S]) stand behind those of the sampling rows.

    The padding row is written too, and stays empty.
    """
    tables.num_computed_tokens[inputs.rows] = inputs.seq_lens
    num_tokens = tables.num_tokens[inputs.sampling_rows].long()
    tables.token_ids[inputs.sampling_rows, num_tokens] = token_ids.int()
    is_request = (inputs.sampling_rows != tables.padding_row).int()
    tables.num_tokens[inputs.sampling_rows] = num_tokens.int() + is_request


def next_positions(tables: DeviceTables, inputs: StepInputs) -> torch.Tensor:
    """Where the tokens to be drawn will stand, int64 [S]."""
    return tables.num_tokens[inputs.sampling_rows].long()


def _slots(tables: DeviceTables, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    blocks = tables.block_table[rows, positions // tables.block_size].long()
    return blocks * tables.block_size + positions % tables.block_size
