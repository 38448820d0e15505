"""A step's inputs, made on the device out of its rows. Used by the runner.

Nothing here waits for the device, and no shape depends on what it holds. Indices are int64, as torch wants them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.attention import AttentionMetadata
from gpu.device.tables import DeviceTables
from gpu.rows import StepShape
from gpu.runner import ModelInputs


class StepInputs(NamedTuple):
    """What the model takes, and whose it is: B requests, S sampled positions."""

    model: ModelInputs
    rows: torch.Tensor  # int64 [B]
    logits_indices: torch.Tensor | None  # int64 [S], into the tokens; None where all are sampled, in order
    sampling_rows: torch.Tensor  # int64 [S]
    sampled_positions: torch.Tensor  # int64 [S], of the tokens to be sampled


def decode_inputs(tables: DeviceTables, size: int) -> StepInputs:
    """Of a step in which `size` places of `batch_rows` decode, some of them padding: shapes follow from `size` alone.

    Padding has length 0 and slot -1, which the kernels leave alone. The lengths on the host stay unknown.
    """
    rows = tables.batch_rows[:size].long()
    is_padding = rows == tables.padding_row
    positions = tables.num_computed_tokens[rows].long()
    seq_lens = (positions + 1).masked_fill_(is_padding, 0)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=tables.device),
        seq_lens=seq_lens.int(),
        block_table=tables.block_table.index_select(0, rows),
        slot_mapping=_slots(tables, rows, positions).masked_fill_(is_padding, -1),
        num_decodes=size,
        query_lens_list=[1] * size,
        seq_lens_list=[],
    )
    input_ids = tables.token_ids[rows, positions].long()
    return StepInputs(ModelInputs(input_ids, positions, metadata), rows, None, rows, seq_lens)


def mixed_inputs(tables: DeviceTables, shape: StepShape) -> StepInputs:
    """Of any step, without padding."""
    num_requests, num_tokens, num_samples = len(shape.rows), int(shape.query_start_loc[-1]), len(shape.samples)
    rows = tables.batch_rows[:num_requests].long()
    query_lens = tables.query_lens[:num_requests].long()
    starts = torch.zeros(num_requests + 1, dtype=torch.int64, device=tables.device)
    torch.cumsum(query_lens, 0, out=starts[1:])
    first = tables.num_computed_tokens[rows].long()

    # Token t of request i stands at position first[i] + (t - starts[i]).
    places = torch.repeat_interleave(query_lens, output_size=num_tokens)
    token_rows = rows[places]
    positions = torch.arange(num_tokens, device=tables.device) + (first - starts[:-1])[places]
    num_blocks = -(-int(shape.seq_lens.max()) // tables.block_size)
    metadata = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=(first + query_lens).int(),
        block_table=tables.block_table[:, :num_blocks].index_select(0, rows),
        slot_mapping=_slots(tables, token_rows, positions),
        num_decodes=shape.num_decodes,
        query_lens_list=shape.query_lens.tolist(),
        seq_lens_list=shape.seq_lens.tolist(),
    )
    logits_indices = tables.logits_indices[:num_samples].long()
    return StepInputs(
        ModelInputs(tables.token_ids[token_rows, positions].long(), positions, metadata),
        rows=rows,
        logits_indices=logits_indices,
        sampling_rows=rows[tables.samples[:num_samples].long()],
        sampled_positions=positions[logits_indices] + 1,
    )


def advance(tables: DeviceTables, inputs: StepInputs, token_ids: torch.Tensor) -> None:
    """Record a step, as `gpu.rows.RowTable.advance` does, with what it has sampled: `token_ids`, int64 [S].

    The padding row is written too, and stays empty: its lengths are 0.
    """
    tables.num_computed_tokens[inputs.rows] = inputs.model.metadata.seq_lens
    tables.token_ids[inputs.sampling_rows, inputs.sampled_positions] = token_ids.int()
    is_request = (inputs.sampling_rows != tables.padding_row).int()
    tables.num_tokens[inputs.sampling_rows] = inputs.sampled_positions.int() + is_request


def _slots(tables: DeviceTables, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    blocks = tables.block_table[rows, positions // tables.block_size].long()
    return blocks * tables.block_size + positions % tables.block_size
