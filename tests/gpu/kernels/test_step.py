"""What stands before and behind the model in a step, against loops over requests."""

from __future__ import annotations

import random

import pytest
import torch

from gpu.device.tables import DeviceTables, Upload
from gpu.kernels import record_step, step_inputs
from gpu.runner.rows import BatchSizes

SIZES = BatchSizes(max_num_seqs=6, max_model_len=5000, block_size=16, num_groups=3)
PADDING = SIZES.max_num_seqs


def filled_tables(rng: random.Random) -> DeviceTables:
    torch.manual_seed(rng.randrange(2**31))
    tables = DeviceTables(SIZES, 50, torch.device("cpu"))
    tables.token_ids[:PADDING] = torch.randint(0, 50, (PADDING, SIZES.row_len)).int()
    tables.block_tables[:PADDING] = torch.randint(0, 2**24, (PADDING, 3, SIZES.row_blocks)).int()
    tables.num_computed_tokens[:PADDING] = torch.tensor([rng.choice([0, 15, 16, 700]) for _ in range(PADDING)]).int()
    return tables


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 1, 4300], [1, 7, 300, 1], []])
def test_inputs_are_the_tokens_of_the_requests_and_then_padding(query_lens):
    rng = random.Random(len(query_lens))
    tables = filled_tables(rng)
    rows = rng.sample(range(PADDING), len(query_lens))
    all_decode = query_lens == [1, 1, 1]
    num_requests, num_tokens = PADDING - 1, PADDING - 1 if all_decode else sum(query_lens) + 3
    tables.batch_rows[: len(rows)] = torch.tensor(rows).int()
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    tables.query_start_loc[:] = ends[-1]
    tables.query_start_loc[: len(ends)] = ends

    ids, positions, slots, blocks = step_inputs(tables, num_requests, num_tokens, all_decode=all_decode)

    token = 0
    for request, (row, query_len) in enumerate(zip(rows, query_lens, strict=True)):
        computed = int(tables.num_computed_tokens[row])
        length = computed + query_len
        assert tables.seq_lens[request] == length
        used = -(-length // 16)
        assert torch.equal(blocks[:, request, :used], tables.block_tables[row, :, :used])
        expected = torch.arange(computed, length)
        part = slice(token, token + query_len)
        assert torch.equal(positions[part], expected)
        assert torch.equal(ids[part], tables.token_ids[row, computed:length].long())
        assert torch.equal(slots[:, part], tables.block_tables[row].long()[:, expected // 16] * 16 + expected % 16)
        if all_decode:
            assert [int(tables.sampling_rows[request]), int(tables.sampled_positions[request])] == [row, length]
        token += query_len
    assert not tables.seq_lens[len(rows) : num_requests].any()
    assert not ids[token:].any()
    assert not positions[token:].any()
    assert (slots[:, token:] == -1).all()
    assert len(ids) == num_tokens


def test_what_was_sampled_is_recorded_for_the_next_step_and_packed_for_the_host():
    tables = filled_tables(random.Random(1))
    tables.batch_rows[:4] = torch.tensor([4, 0, PADDING, 2]).int()
    tables.seq_lens[:4] = torch.tensor([9, 20, 0, 31]).int()
    tables.sampling_rows[:3] = torch.tensor([4, PADDING, 2])
    tables.sampled_positions[:3] = torch.tensor([9, 0, 31])
    before = tables.token_ids.clone(), tables.num_computed_tokens.clone(), tables.num_tokens.clone()
    packed = torch.full((5,), 77, dtype=torch.int32)
    record_step(tables, 4, torch.tensor([11, 12, 13]), torch.tensor([True, True, False]), packed)
    assert packed.tolist() == [11, 12, -14, 77, 77]
    before[0][4, 9], before[0][2, 31] = 11, 13
    assert torch.equal(tables.token_ids[:PADDING], before[0][:PADDING])
    for row, length in ((4, 9), (0, 20), (2, 31)):
        before[1][row] = length
    assert torch.equal(tables.num_computed_tokens, before[1])
    before[2][4], before[2][2] = 10, 32
    assert torch.equal(tables.num_tokens, before[2])


def test_segments_of_any_length_go_where_they_belong():
    buffer = torch.zeros(9000, dtype=torch.int32)
    upload = Upload(buffer)
    for offset, length in ((5, 1), (100, 5000), (6000, 256), (8999, 1)):
        upload.write(offset, range(offset, offset + length))
    upload.send()
    for offset, length in ((5, 1), (100, 5000), (6000, 256), (8999, 1)):
        assert buffer[offset : offset + length].tolist() == list(range(offset, offset + length))
    assert int((buffer != 0).sum()) == 1 + 5000 + 256 + 1
