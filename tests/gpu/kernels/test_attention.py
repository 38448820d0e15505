"""Paged attention against its definition, in float64, one query and one head at a time."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gpu.attention import TritonAttention
from gpu.checkpoint.architecture import Heads
from gpu.kernels import attention, list_attention_work, paged_attention
from gpu.kernels.attention import AttentionWork
from gpu.kernels.prefill import paged_prefill
from tests.gpu.paging import Span, make_metadata
from tests.selection import slow_except

# bfloat16 is left out: Triton's interpreter multiplies its matrices wrongly. It is checked on a card by gpu_bench.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
POISON = float("nan")


@dataclass
class Case:
    """Some requests with keys and values in a paged cache, NaN in every slot that is not theirs, and queries."""

    spans: list[Span]
    kv: list[torch.Tensor]  # of each request, [2, kv_heads, seq_len, head_dim]
    queries: list[torch.Tensor]  # of each request, [query_len, heads, head_dim]
    cache: torch.Tensor
    block_size: int
    window: int | None
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]

    def oracle(self, index: int) -> torch.Tensor:
        query, (key, value) = self.queries[index].double(), self.kv[index].double()
        group = query.shape[1] // key.shape[0]
        output = torch.zeros_like(query)
        for i in range(len(query)):
            stop = key.shape[1] - len(query) + i + 1
            start = 0 if self.window is None else max(0, stop - self.window)
            for head in range(query.shape[1]):
                scores = key[head // group, start:stop] @ query[i, head] * self.scale
                if self.softcap is not None:
                    scores = (scores / self.softcap).tanh() * self.softcap
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks[head].double()[None]))
                output[i, head] = scores.softmax(0)[: stop - start] @ value[head // group, start:stop]
        return output

    def assert_right(self, output: torch.Tensor) -> None:
        """`output` holds the requests' queries one after the other."""
        tolerance = TOLERANCE[output.dtype]
        for i, part in enumerate(output.split([len(query) for query in self.queries])):
            torch.testing.assert_close(part.double(), self.oracle(i), atol=tolerance, rtol=tolerance)


def make_case(
    rng: random.Random,
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    """`lengths` are (query_len, seq_len); blocks are dealt from a shuffled pool. The cache may be of another type."""
    torch.manual_seed(rng.randrange(2**31))
    num_heads, num_kv_heads = heads
    pool = list(range(sum(-(-seq_len // block_size) for _, seq_len in lengths) + 2))
    rng.shuffle(pool)
    cache = torch.full((len(pool), 2, num_kv_heads, block_size, head_dim), POISON).to(kv_dtype or dtype)
    case = Case([], [], [], cache, block_size, window, rng.choice([head_dim**-0.5, 0.2]), softcap)
    if sinks:
        case.sinks = torch.randn(num_heads) * 3
    for query_len, seq_len in lengths:
        blocks = [pool.pop() for _ in range(-(-seq_len // block_size))]
        kv = torch.randn(2, num_kv_heads, seq_len, head_dim).to(kv_dtype or dtype)
        for number, block in enumerate(blocks):
            tokens = kv[:, :, number * block_size : (number + 1) * block_size]
            cache[block, :, :, : tokens.shape[2]] = tokens
        case.spans.append(Span(query_len, seq_len, blocks))
        case.kv.append(kv)
        case.queries.append(torch.randn(query_len, num_heads, head_dim).to(dtype))
    return case


def random_shape(rng: random.Random) -> dict[str, Any]:
    return {
        "heads": rng.choice([(4, 1), (6, 2), (7, 1), (2, 2)]),
        "head_dim": rng.choice([64, 80, 96, 128, 256]),
        "block_size": rng.choice([8, 16, 32, 48]),
        "window": rng.choice([None, None, 5, 40, 150]),
        "dtype": rng.choice(list(TOLERANCE)),
        "sinks": rng.random() < 0.5,
    }


def attend(case: Case, out: torch.Tensor | None = None, *, known: bool = True) -> torch.Tensor:
    """`known` is whether the host knows how many queries there are of each."""
    metadata = make_metadata(case.spans, case.block_size, case.window)
    query = torch.cat(case.queries)
    num_decodes = metadata.num_decodes if known else None
    tables = (metadata.seq_lens, metadata.query_start_loc)
    work = list_attention_work(
        query,
        case.cache.shape[2],
        *tables,
        window=case.window,
        num_decodes=num_decodes,
        longest_chunk=max(metadata.query_lens_list) if known else None,
    )
    return paged_attention(
        query,
        case.cache,
        metadata.block_table,
        *tables,
        work,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        num_decodes=num_decodes,
        out=out,
    )


@pytest.mark.parametrize("seed", slow_except(range(10), 0, 1, 2))
def test_decode_over_any_lengths_and_shapes(seed):
    rng = random.Random(seed)
    lengths = [(1, rng.choice([1, 15, 16, 17, 63, 64, 65, rng.randint(1, 500)])) for _ in range(rng.randint(1, 3))]
    case = make_case(rng, lengths, **random_shape(rng))
    case.assert_right(attend(case))


@pytest.mark.parametrize("seed", slow_except(range(8), 0, 1))
def test_prefill_of_whole_prompts_chunks_and_prompts_behind_a_cached_prefix(seed):
    rng = random.Random(100 + seed)
    lengths = []
    for _ in range(rng.randint(1, 3)):
        query_len, computed = rng.choice([1, 2, 17, 64, 70]), rng.choice([0, 0, 16, 63, 130])
        lengths.append((query_len, query_len + computed))
    case = make_case(rng, sorted(lengths, key=lambda length: length[0] > 1), **random_shape(rng))
    case.assert_right(attend(case, known=seed % 2 == 0))


def test_a_long_request_among_short_ones_is_cut_so_that_no_program_has_much_more_than_its_share(form):
    """On a device of four processors, where sixteen parts of a KV head run at once: few of 300 requests, and all of
    them short but one."""
    lengths = [4096] + [100] * 40
    work = list_attention_work(
        torch.empty(41, 4, 64), 1, torch.tensor(lengths).int(), torch.arange(42).int(), num_decodes=41
    )
    if work is None:
        assert form == "reference"
        return
    parts = work.parts[work.parts[:, 0] >= 0]
    assert parts[:, 0].bincount().tolist() == [8] + [1] * 40  # (4096 + 40 * 100) / 16 = 506 tokens each
    assert work.merged[0, 0] == 1
    assert work.merged[1].tolist() == [0, 8, 0, 1]  # first part, number of parts, first query, number of queries
    assert parts[:8].tolist() == [[0, part, 8, 4096] for part in range(8)]
    assert len(work.blocks) == 0


def test_a_chunk_behind_a_long_prefix_is_cut_over_its_keys_where_its_blocks_are_too_few_to_fill_the_device(form):
    """The device has four processors, which run twelve programs of a KV head at once. A block has eight queries."""

    def work_of(*lengths: tuple[int, int]) -> AttentionWork | None:
        starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).int()
        seq_lens = torch.tensor([seq_len for _, seq_len in lengths]).int()
        return list_attention_work(torch.empty(int(starts[-1]), 4, 64), 1, seq_lens, starts)

    work = work_of((1, 9), (20, 4116), (10, 30))
    if work is None:
        assert form == "reference"
        return
    blocks = work.blocks[work.blocks[:, 0] >= 0].tolist()
    assert blocks[:12] == [[1, first, part, 4] for first in (0, 8, 16) for part in range(4)]
    assert blocks[12:] == [[2, 0, 0, 1], [2, 8, 0, 1]]
    assert work.merged_blocks[0, 0] == 3
    assert work.merged_blocks[1:4].tolist() == [[0, 4, 1, 8], [4, 4, 9, 8], [8, 4, 17, 4]]
    for few_keys_or_many_blocks in ([(20, 700)], [(140, 4096)], [(1, 4096), (20, 20)]):
        work = work_of(*few_keys_or_many_blocks)
        assert work is not None
        assert work.merged_blocks[0, 0] == 0


@pytest.mark.parametrize("seed", slow_except(range(8), 0))
def test_every_part_and_block_of_any_step_is_in_the_lists_once_and_none_is_left_out_for_room(form, seed):
    rng = random.Random(seed)
    for _ in range(5):
        query_lens = sorted((rng.choice([1, 1, 2, 9, 40, 100]) for _ in range(rng.randint(1, 12))), key=lambda n: n > 1)
        lengths = [n + rng.choice([0, 50, 1000, rng.randint(0, 9000)]) for n in query_lens]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        query = torch.empty(sum(query_lens), 4, 64)
        work = list_attention_work(query, 1, torch.tensor(lengths).int(), starts, window=rng.choice([None, 1000]))
        if work is None:
            assert form == "reference"
            return
        expected = [(i, first) for i, n in enumerate(query_lens) if n > 1 for first in range(0, n, 8)]
        listed = [tuple(entry) for entry in work.blocks.tolist() if entry[0] >= 0]
        assert sorted((request, first) for request, first, part, _ in listed if part == 0) == expected
        assert len(set(listed)) == len(listed)
        assert all((request, first, i, n) in listed for request, first, _, n in listed for i in range(n))
        of_cut = [each for each in work.blocks[: len(work.merged_blocks) - 1].tolist() if each[0] >= 0]
        assert all(num_parts > 1 for *_, num_parts in of_cut)
        assert work.merged_blocks[0, 0] == sum(part == 0 for _, _, part, _ in of_cut)
        assert sum(n > 1 for *_, n in listed) == len(of_cut)
        parts = work.parts[work.parts[:, 0] >= 0].tolist()
        assert [request for request, part, *_ in parts if part == 0] == list(range(query_lens.count(1)))
        assert work.merged[0, 0] == sum(part == 1 for _, part, *_ in parts)


@pytest.mark.parametrize("seed", slow_except(range(10), 0, 1))
def test_chunks_cut_over_their_keys_beside_decodes_and_chunks_in_one_piece(seed, form, monkeypatch):
    """The test lowers the minimum length of a part, so that many blocks are cut."""
    monkeypatch.setattr(attention, "MIN_BLOCK_PART_TOKENS", 20)
    rng = random.Random(200 + seed)
    lengths = [(1, rng.randint(1, 500))] * rng.randint(0, 2) + [(rng.choice([2, 7]), 9)] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 2)):
        query_len = rng.choice([2, 5, 12])
        lengths.append((query_len, query_len + rng.randint(150, 600)))
    case = make_case(rng, lengths, **random_shape(rng) | {"window": [None, 45, 150][seed % 3]})
    used = []

    def noted(*args: Any, **keywords: Any) -> None:
        used.append(int(keywords["merged"][0, 0]))
        paged_prefill(*args, **keywords)

    monkeypatch.setattr(attention, "paged_prefill", noted)
    case.assert_right(attend(case, known=seed % 2 == 0))
    assert form == "reference" or used[0] > 0


def test_padding_of_a_graph_gets_zeros_and_reads_nothing():
    case = make_case(random.Random(0), [(1, 300)], heads=(4, 2))
    table = torch.full((3, 32), 2**30, dtype=torch.int32)
    table[1, : len(case.spans[0].blocks)] = torch.tensor(case.spans[0].blocks, dtype=torch.int32)
    query = case.queries[0].expand(3, -1, -1).contiguous()
    lengths, starts = torch.tensor([0, 300, 0], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    work = list_attention_work(query, 2, lengths, starts, num_decodes=3)
    output = paged_attention(query, case.cache, table, lengths, starts, work, scale=case.scale, num_decodes=3)
    case.assert_right(output[1:2])
    assert not output[0].any()
    assert not output[2].any()


def test_rows_of_nobody_are_left_alone_and_so_are_requests_without_queries():
    case = make_case(random.Random(1), [(1, 7), (3, 20), (5, 9)], heads=(4, 2))
    metadata = make_metadata(case.spans, 16)
    query = torch.cat((*case.queries, torch.full((2, 4, 64), POISON)))
    output = torch.full_like(query, 7.0)
    lengths = torch.cat((metadata.seq_lens, torch.zeros(4, dtype=torch.int32)))
    starts = torch.cat((metadata.query_start_loc, torch.full((4,), 9, dtype=torch.int32)))
    table = torch.cat((metadata.block_table, torch.full((4, metadata.block_table.shape[1]), 2**30, dtype=torch.int32)))
    work = list_attention_work(query, 2, lengths, starts)
    paged_attention(query, case.cache, table, lengths, starts, work, scale=case.scale, out=output)
    assert (output[9:] == 7.0).all()
    case.assert_right(output[:9])


@pytest.mark.parametrize("window", [None, 50])
def test_scores_are_capped_in_decodes_and_chunks(window):
    case = make_case(random.Random(3), [(1, 70), (1, 300), (20, 90)], heads=(4, 1), window=window, softcap=1.5)
    case.assert_right(attend(case))


@pytest.mark.parametrize("window", [None, 50])
def test_a_cache_of_8_bits_is_read_as_the_numbers_that_it_has(window):
    lengths = [(1, 70), (1, 300), (20, 90)]
    kinds: dict[str, Any] = {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn}
    case = make_case(random.Random(4), lengths, heads=(4, 2), window=window, **kinds)
    case.assert_right(attend(case))


@pytest.mark.slow
@pytest.mark.parametrize("window", slow_except([None, 200], 200))
def test_a_sink_takes_its_share_once_in_decodes_of_one_part_or_several_and_in_chunks(window):
    lengths = [(1, 20), (1, 700), (1, 3), (20, 290)]
    case = make_case(random.Random(5), lengths, heads=(6, 2), window=window, sinks=True)
    assert case.sinks is not None
    case.sinks[:3] = torch.tensor([-80.0, 4.0, 30.0])  # nothing, the most, and next to all
    output = attend(case)
    case.assert_right(output)
    assert output[:3, 2].abs().max() < 1e-9
    case.softcap = 1.5
    case.assert_right(attend(case))


def test_padding_of_a_graph_gets_zeros_with_sinks_too():
    query, cache = torch.randn(2, 4, 64), torch.full((2, 2, 2, 16, 64), POISON)
    lengths, starts = torch.zeros(2, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    work = list_attention_work(query, 2, lengths, starts, num_decodes=2)
    table = torch.full((2, 4), 2**30, dtype=torch.int32)
    where = (table, lengths, starts)
    output = paged_attention(query, cache, *where, work, scale=1.0, sinks=torch.randn(4), num_decodes=2)
    assert not output.any()


@pytest.mark.parametrize("window", [None, 50])
def test_the_backend_writes_its_cache_and_attends_in_a_step_of_decodes_and_chunks(window):
    rng = random.Random(3)
    case = make_case(rng, [(1, 70), (1, 3), (20, 20), (9, 60)], heads=(6, 2), window=window)
    metadata = make_metadata(case.spans, 16)
    for span in case.spans:  # what the step itself must write
        for position in range(span.seq_len - span.query_len, span.seq_len):
            case.cache[span.blocks[position // 16], :, :, position % 16] = POISON
    qkv = [
        torch.cat((query, *kv[:, :, -len(query) :].transpose(1, 2)), dim=1)
        for query, kv in zip(case.queries, case.kv, strict=True)
    ]
    positions, unrotated = torch.zeros(31, dtype=torch.int64), torch.eye(2).unsqueeze(2).expand(2, 2, 64)[:, :1]
    attention = TritonAttention(Heads(6, 2, 64, case.scale, window), 16)
    output = attention.forward_fused(torch.cat(qkv), positions, unrotated.contiguous(), None, 0.0, case.cache, metadata)
    case.assert_right(output)
