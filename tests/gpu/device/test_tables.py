"""What a device runner is made of: uploads, tables and the sizes of graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gpu.device.graphs import LARGEST, StepGraphs, ladder
from gpu.device.tables import DeviceTables, Upload, words_of
from gpu.runner.rows import BatchSizes
from tests.gpu.device_runners import CPU, Again


def test_an_upload_writes_every_word_where_it_belongs() -> None:
    draw = random.Random(0)
    buffer = torch.zeros(1000, dtype=torch.int32)
    expected = buffer.tolist()
    upload = Upload(buffer)
    for _ in range(20):
        places = sorted(draw.sample(range(100), 12))
        for place in places:
            values = [draw.randrange(-(2**31), 2**31) for _ in range(draw.randrange(11))]
            upload.write(10 * place, values)
            expected[10 * place : 10 * place + len(values)] = values
        upload.send()
        assert buffer.tolist() == expected
    upload.write(0, [-1])
    upload.discard()
    upload.send()
    assert buffer.tolist() == expected


def test_tables_lie_apart_and_words_keep_their_meaning() -> None:
    tables = DeviceTables(BatchSizes(5, 9, 4), 11, CPU)
    upload = Upload(tables.buffer)
    upload.write(tables.offset("seed", 3), words_of(np.array([2**64 - 5], dtype=np.uint64), np.int64))
    upload.write(tables.offset("top_p", 4), words_of(np.array([0.25]), np.float32))
    upload.write(tables.offset("block_tables", 2, 1), [8, 9])
    upload.write(tables.offset("token_ids", 5, 9), [77])
    upload.send()
    assert tables.columns["seed"].tolist() == [0, 0, 0, -5, 0, 0]
    assert tables.columns["top_p"].tolist() == [1, 1, 1, 1, 0.25, 1]
    assert tables.block_tables[:, 0].tolist() == [[0] * 3, [0] * 3, [0, 8, 9], [0] * 3, [0] * 3, [0] * 3]
    assert tables.token_ids[5].tolist() == [0] * 9 + [77]
    # And the padding row in every place of the batch, and every row's top_p and repetition penalty.
    assert int((tables.buffer != 0).sum()) == 2 + 2 + 1 + 6 + 6 + 6


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 100, 256, 1000, 2048])
def test_the_ladder_has_a_size_for_every_batch_up_to_its_largest(max_num_seqs: int) -> None:
    sizes = ladder(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, LARGEST)
    assert len(sizes) <= 40
    order: list[tuple[str, int]] = []
    graphs = StepGraphs(Again(), max_num_seqs, max_num_seqs, lambda kind, size: order.append((kind, size)))
    assert graphs.find("step", 1) is None
    while graphs.num_missing:
        graphs.capture_next()
    graphs.capture_next()
    assert order[0] == ("hidden", sizes[-1])  # which needs the most memory
    assert order[1:] == [
        *(("step", size) for size in reversed(sizes)),
        *(("hidden", size) for size in reversed(sizes[:-1])),
    ]
    for num_rows in range(1, sizes[-1] + 1):
        found = graphs.find("step", num_rows)
        assert found is not None
        assert num_rows <= found[0] < num_rows + max(32, num_rows // 4 + 4)
    assert graphs.find("step", sizes[-1] + 1) is None
