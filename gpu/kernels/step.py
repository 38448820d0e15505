"""What stands before and behind the model in a step: diffs into the tables, tokens out of them, and back into them.

Called by gpu.device, whose `DeviceTables` holds all the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpu.kernels.dispatch import on_triton

if TYPE_CHECKING:
    from gpu.kernels.shapes import StepTables


def scatter_words(buffer: torch.Tensor, staged: torch.Tensor, num_segments: int) -> None:
    """Write segments to `buffer` (int32, flat), no word twice. `staged` is int32: of each segment where it goes, then
    of each how long it is, then of each where its words begin among all words, and then all words."""
    if on_triton(buffer):
        from gpu.kernels.jit import step

        step.scatter_words(buffer, staged, num_segments)
        return
    targets, lengths, sources = staged[: 3 * num_segments].view(3, -1).tolist()
    words = staged[3 * num_segments :]
    for target, length, source in zip(targets, lengths, sources, strict=True):
        buffer[target : target + length] = words[source : source + length]


def step_inputs(
    tables: StepTables, num_requests: int, num_tokens: int, *, all_decode: bool
) -> tuple[torch.Tensor, ...]:
    """The tokens of the requests in `batch_rows[:num_requests]`, one request after the other: their ids, positions and
    slots, int64 [T] and [groups, T], and the block tables, int32 [groups, R, row_blocks].

    Request i has the tokens from `query_start_loc[i]` to `query_start_loc[i + 1]`; if `all_decode`, it has one, and
    `sampling_rows` and `sampled_positions` are written as well: everybody samples, in order. `seq_lens` is written in
    any case. A request in the padding row has length 0, and its tokens have slot -1, as have those beyond the last
    request.
    """
    if on_triton(tables.buffer):
        from gpu.kernels.jit import step

        return step.step_inputs(tables, num_requests, num_tokens, all_decode)
    rows = tables.batch_rows[:num_requests].long()
    starts = (tables.one_each if all_decode else tables.query_start_loc)[: num_requests + 1].long()
    is_padding = rows == tables.padding_row
    first = tables.num_computed_tokens[rows]
    seq_lens = (first + starts.diff()).masked_fill(is_padding, 0)
    tables.seq_lens[:num_requests] = seq_lens
    if all_decode:
        tables.sampling_rows[:num_requests] = rows
        tables.sampled_positions[:num_requests] = seq_lens
    token = torch.arange(num_tokens, device=rows.device)
    request = (torch.searchsorted(starts, token, right=True) - 1).clamp(max=num_requests - 1)
    is_padding = is_padding[request] | (token >= starts[-1])
    positions = (first[request] + token - starts[request]).masked_fill(is_padding, 0)
    row, block_size = rows[request], tables.block_size
    slots = tables.block_tables[row, :, positions // block_size].long().T * block_size + positions % block_size
    input_ids = tables.token_ids[row, positions].long().masked_fill(is_padding, 0)
    return input_ids, positions, slots.masked_fill(is_padding, -1), tables.block_tables[rows].transpose(0, 1)


def record_step(
    tables: StepTables, num_requests: int, token_ids: torch.Tensor, finite: torch.Tensor, packed: torch.Tensor
) -> None:
    """What `gpu.runner.rows.RowTable.advance` does, on the device: all tokens of the step are computed, and behind them
    stand those that were sampled, `token_ids`, int64 [S], at `sampled_positions` of `sampling_rows`.

    To `packed`, int32 [>= S], goes what the host is told: a token, or -1 - token where `finite` says that it means
    nothing. The padding row stays empty.
    """
    if on_triton(tables.buffer):
        from gpu.kernels.jit import step

        step.record_step(tables, num_requests, token_ids, finite, packed)
        return
    rows, num_samples = tables.batch_rows[:num_requests].long(), len(token_ids)
    tables.num_computed_tokens[rows] = tables.seq_lens[:num_requests]
    sampling_rows, positions = tables.sampling_rows[:num_samples], tables.sampled_positions[:num_samples]
    tables.token_ids[sampling_rows, positions] = token_ids.int()
    tables.num_tokens[sampling_rows] = (positions + (sampling_rows != tables.padding_row)).int()
    packed[:num_samples] = torch.where(finite, token_ids, -1 - token_ids)
