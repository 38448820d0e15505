"""Kernels of gpu.kernels.step: one program per segment, or per request, and some more where these are long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from gpu.kernels.shapes import StepTables

BLOCK = 256
CHUNKS = 8  # programs that share a segment, or a request


def scatter_words(buffer: torch.Tensor, staged: torch.Tensor, num_segments: int) -> None:
    _scatter_words[(num_segments, CHUNKS)](buffer, staged, num_segments, BLOCK=BLOCK)


def step_inputs(tables: StepTables, num_requests: int, num_tokens: int, all_decode: bool) -> tuple[torch.Tensor, ...]:
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


def record_step(
    tables: StepTables, num_requests: int, token_ids: torch.Tensor, finite: torch.Tensor, packed: torch.Tensor
) -> None:
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
    if request == tl.num_programs(0) - 1:  # the tokens of nobody
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
