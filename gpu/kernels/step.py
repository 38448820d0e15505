"""The work of a step around the model, on the device: updates of the tables, the model's inputs, and sampled tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu.kernels.dispatch import on_triton, tl, triton

BLOCK = 256
CHUNKS = 8  # programs that share a segment or a request


class StepTables(Protocol):
    """The tables of a step on the device, as `gpu.device.tables.DeviceTables` keeps them: one row per request."""

    device: torch.device
    buffer: torch.Tensor
    block_size: int
    padding_row: int  # a row that no request uses; the padding of a graph points to it
    num_tokens: torch.Tensor
    num_computed_tokens: torch.Tensor
    block_tables: torch.Tensor
    token_ids: torch.Tensor
    batch_rows: torch.Tensor
    query_start_loc: torch.Tensor
    one_each: torch.Tensor
    seq_lens: torch.Tensor
    sampling_rows: torch.Tensor
    sampled_positions: torch.Tensor


def scatter_words(buffer: torch.Tensor, staged: torch.Tensor, num_segments: int) -> None:
    """Write segments to `buffer` (int32, flat), no word twice. `staged` (int32) has the targets of all segments, then
    their lengths, then the indices of their first words, and then all words."""
    if on_triton(buffer):
        _scatter_words[(num_segments, CHUNKS)](buffer, staged, num_segments, BLOCK=BLOCK)
        return
    targets, lengths, sources = staged[: 3 * num_segments].view(3, -1).tolist()
    words = staged[3 * num_segments :]
    for target, length, source in zip(targets, lengths, sources, strict=True):
        buffer[target : target + length] = words[source : source + length]


@triton.jit(do_not_specialize=["num_segments"])
def _scatter_words(buffer_ptr, staged_ptr, num_segments, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    target = tl.load(staged_ptr + segment).to(tl.int64)
    length = tl.load(staged_ptr + num_segments + segment)
    source = tl.load(staged_ptr + 2 * num_segments + segment) + 3 * num_segments
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < length
        tl.store(buffer_ptr + target + word, tl.load(staged_ptr + source + word, mask=inside), mask=inside)


def step_inputs(
    tables: StepTables, num_requests: int, num_tokens: int, *, all_decode: bool
) -> tuple[torch.Tensor, ...]:
    """Return the tokens of the requests in `batch_rows[:num_requests]`, one request after the other: ids and positions,
    int64 [T], slots, int64 [groups, T], and block tables, int32 [groups, R, row_blocks]. Write `seq_lens`.

    Request i has the tokens from `query_start_loc[i]` to `query_start_loc[i + 1]`. With `all_decode` each has one token
    and samples the next, so `sampling_rows` and `sampled_positions` are written as well. A request in the padding row
    has length 0, and its tokens have slot -1, as have those beyond the last request.
    """
    if not on_triton(tables.buffer):
        return _step_inputs_reference(tables, num_requests, num_tokens, all_decode)
    _, num_groups, row_blocks = tables.block_tables.shape
    input_ids, positions = (torch.empty(num_tokens, dtype=torch.int64, device=tables.device) for _ in range(2))
    slots = torch.empty((num_groups, num_tokens), dtype=torch.int64, device=tables.device)
    block_tables = torch.empty((num_groups, num_requests, row_blocks), dtype=torch.int32, device=tables.device)
    _step_inputs[(num_requests, CHUNKS)](
        input_ids,
        positions,
        slots,
        block_tables,
        tables.seq_lens,
        tables.sampling_rows,
        tables.sampled_positions,
        tables.batch_rows,
        tables.query_start_loc,
        tables.num_computed_tokens,
        tables.token_ids,
        tables.block_tables,
        num_tokens,
        tables.token_ids.stride(0),
        row_blocks,
        tables.padding_row,
        NUM_GROUPS=num_groups,
        ALL_DECODE=all_decode,
        BLOCK_SIZE=tables.block_size,
        BLOCK=BLOCK,
    )
    return input_ids, positions, slots, block_tables


def _step_inputs_reference(
    tables: StepTables, num_requests: int, num_tokens: int, all_decode: bool
) -> tuple[torch.Tensor, ...]:
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


@triton.jit(do_not_specialize=["num_tokens"])
def _step_inputs(
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    blocks_ptr,
    seq_lens_ptr,
    sampling_rows_ptr,
    sampled_positions_ptr,
    rows_ptr,
    starts_ptr,
    num_computed_ptr,
    token_ids_ptr,
    table_ptr,
    num_tokens,
    token_ids_stride,
    row_blocks,
    padding_row,
    NUM_GROUPS: tl.constexpr,
    ALL_DECODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    step = tl.num_programs(1) * BLOCK
    row = tl.load(rows_ptr + request).to(tl.int64)
    if ALL_DECODE:
        begin = request
        end = request + 1
    else:
        begin = tl.load(starts_ptr + request)
        end = tl.load(starts_ptr + request + 1)
    first = tl.load(num_computed_ptr + row)
    length = tl.where(row == padding_row, 0, first + end - begin)
    if chunk == 0:
        tl.store(seq_lens_ptr + request, length)
        if ALL_DECODE:
            tl.store(sampling_rows_ptr + request, row)
            tl.store(sampled_positions_ptr + request, length.to(tl.int64))

    token_row_ptr = token_ids_ptr + row * token_ids_stride
    table_row_ptr = table_ptr + row * NUM_GROUPS * row_blocks
    used_end = tl.where(row == padding_row, begin, end)
    for start in range(begin + chunk * BLOCK, end, step):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        used = token < used_end
        position = tl.where(used, first + token - begin, 0)
        token_id = tl.load(token_row_ptr + position, mask=used, other=0)
        tl.store(input_ids_ptr + token, token_id.to(tl.int64), mask=inside)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=inside)
        for group in range(NUM_GROUPS):
            place = group * row_blocks + position // BLOCK_SIZE
            block = tl.load(table_row_ptr + place, mask=used, other=0).to(tl.int64)
            slot = tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slots_ptr + group * num_tokens + token, slot, mask=inside)
    if request == tl.num_programs(0) - 1:  # the tokens beyond the last request
        for start in range(end + chunk * BLOCK, num_tokens, step):
            token = start + tl.arange(0, BLOCK)
            inside = token < num_tokens
            nothing = tl.zeros([BLOCK], tl.int64)
            tl.store(input_ids_ptr + token, nothing, mask=inside)
            tl.store(positions_ptr + token, nothing, mask=inside)
            for group in range(NUM_GROUPS):
                tl.store(slots_ptr + group * num_tokens + token, nothing - 1, mask=inside)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    for start in range(chunk * BLOCK, num_blocks, step):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_blocks
        for group in range(NUM_GROUPS):
            block = tl.load(table_row_ptr + group * row_blocks + place, mask=inside, other=0)
            target = (group * tl.num_programs(0) + request).to(tl.int64) * row_blocks
            tl.store(blocks_ptr + target + place, block, mask=inside)


def record_step(
    tables: StepTables, num_requests: int, token_ids: torch.Tensor, finite: torch.Tensor, packed: torch.Tensor
) -> None:
    """Advance the tables as `gpu.runner.rows.RowTable.advance` does: all tokens of the step are computed, and the
    sampled ones, `token_ids`, int64 [S], are stored at `sampled_positions` of `sampling_rows`. The padding row stays
    empty.

    `packed`, int32 [>= S], gets the tokens for the host: a token, or -1 - token where `finite` is False and the token
    means nothing.
    """
    if on_triton(tables.buffer):
        count = max(num_requests, len(token_ids))
        _record_step[(triton.cdiv(count, BLOCK),)](
            packed,
            tables.num_computed_tokens,
            tables.num_tokens,
            tables.token_ids,
            tables.batch_rows,
            tables.seq_lens,
            tables.sampling_rows,
            tables.sampled_positions,
            token_ids,
            finite,
            num_requests,
            len(token_ids),
            tables.token_ids.stride(0),
            tables.padding_row,
            BLOCK=BLOCK,
        )
        return
    rows, num_samples = tables.batch_rows[:num_requests].long(), len(token_ids)
    tables.num_computed_tokens[rows] = tables.seq_lens[:num_requests]
    sampling_rows, positions = tables.sampling_rows[:num_samples], tables.sampled_positions[:num_samples]
    tables.token_ids[sampling_rows, positions] = token_ids.int()
    tables.num_tokens[sampling_rows] = (positions + (sampling_rows != tables.padding_row)).int()
    packed[:num_samples] = torch.where(finite, token_ids, -1 - token_ids)


@triton.jit(do_not_specialize=["num_requests", "num_samples"])
def _record_step(
    packed_ptr,
    num_computed_ptr,
    num_tokens_ptr,
    token_ids_ptr,
    rows_ptr,
    seq_lens_ptr,
    sampling_rows_ptr,
    sampled_positions_ptr,
    sampled_ptr,
    finite_ptr,
    num_requests,
    num_samples,
    token_ids_stride,
    padding_row,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + place, mask=place < num_requests, other=padding_row)
    length = tl.load(seq_lens_ptr + place, mask=place < num_requests, other=0)
    tl.store(num_computed_ptr + row, length, mask=row != padding_row)

    inside = place < num_samples
    row = tl.load(sampling_rows_ptr + place, mask=inside, other=padding_row)
    position = tl.load(sampled_positions_ptr + place, mask=inside, other=0)
    token_id = tl.load(sampled_ptr + place, mask=inside, other=0).to(tl.int32)
    finite = tl.load(finite_ptr + place, mask=inside, other=0).to(tl.int1)
    is_request = row != padding_row
    tl.store(token_ids_ptr + row * token_ids_stride + position, token_id, mask=is_request)
    tl.store(num_tokens_ptr + row, (position + 1).to(tl.int32), mask=is_request)
    tl.store(packed_ptr + place, tl.where(finite, token_id, -1 - token_id), mask=inside)
