"""Paged attention against the definition of attention, in float64, one query at a time."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.attention import FREE_PADDING, PADDING_SHARE, TILE, TorchAttention, group_by_length
from gpu.checkpoint.architecture import Heads
from tests.gpu.paging import Span, make_metadata

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Step:
    """A random mixture of requests, with the cache as earlier steps left it and NaN everywhere else."""

    attention: TorchAttention
    spans: list[Span]
    keys: list[torch.Tensor]  # of each request, [seq_len, kv_heads, head_dim]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]  # [query_len, heads, head_dim]
    cache: torch.Tensor
    sinks: torch.Tensor | None = None  # [heads]

    def run(self) -> list[torch.Tensor]:
        """The output of each request."""
        query_lens = [span.query_len for span in self.spans]
        with torch.inference_mode():
            output = self.attention.forward(
                torch.cat(self.queries),
                torch.cat([k[len(k) - n :] for k, n in zip(self.keys, query_lens, strict=True)]),
                torch.cat([v[len(v) - n :] for v, n in zip(self.values, query_lens, strict=True)]),
                self.cache.clone(),
                make_metadata(self.spans, self.attention.block_size, self.attention.heads.window),
                self.sinks,
            )
        return list(output.split(query_lens))

    def alone(self, index: int) -> "Step":
        """The same cache, but only one request in the batch."""
        keys, values, queries = ([x[index]] for x in (self.keys, self.values, self.queries))
        return Step(self.attention, [self.spans[index]], keys, values, queries, self.cache, self.sinks)

    def oracle(self, index: int) -> torch.Tensor:
        query, key, value = (x[index].double() for x in (self.queries, self.keys, self.values))
        window = self.attention.heads.window or math.inf
        group = self.attention.group_size
        output = torch.empty_like(query)
        for i in range(len(query)):
            position = len(key) - len(query) + i
            first = max(0, position + 1 - window)
            for head in range(query.shape[1]):
                seen = slice(int(first), position + 1)
                scores = key[seen, head // group] @ query[i, head] * self.attention.heads.scale
                if (cap := self.attention.heads.softcap) is not None:
                    scores = (scores / cap).tanh() * cap
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks[head].double()[None]))
                output[i, head] = scores.softmax(0)[: position + 1 - int(first)] @ value[seen, head // group]
        return output


def make_step(
    lengths: list[tuple[int, int]],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """`lengths` are (query_len, seq_len); blocks are dealt from a shuffled pool."""
    generator = torch.Generator().manual_seed(seed)
    scale = head_dim**-0.5 if scale is None else scale
    attention = TorchAttention(Heads(kv_heads * group_size, kv_heads, head_dim, scale, window, softcap), block_size)
    needed = [-(-seq_len // block_size) for _, seq_len in lengths]
    pool = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(pool)
    cache = attention.allocate_kv_cache(len(pool), dtype, torch.device("cpu"))
    cache.fill_(float("nan"))
    step = Step(attention, [], [], [], [], cache)
    if sinks:
        step.sinks = 3 * torch.randn(kv_heads * group_size, generator=generator)
    for (query_len, seq_len), count in zip(lengths, needed, strict=True):
        blocks = [pool.pop() for _ in range(count)]
        step.spans.append(Span(query_len, seq_len, blocks))
        step.keys.append(torch.randn(seq_len, kv_heads, head_dim, generator=generator).to(dtype))
        step.values.append(torch.randn(seq_len, kv_heads, head_dim, generator=generator).to(dtype))
        step.queries.append(torch.randn(query_len, kv_heads * group_size, head_dim, generator=generator).to(dtype))
        for position in range(seq_len - query_len):
            slot = cache[blocks[position // block_size], position % block_size]
            slot[0], slot[1] = step.keys[-1][position], step.values[-1][position]
    return step


def assert_right(step: Step) -> None:
    for i, output in enumerate(step.run()):
        tolerance = TOLERANCE[output.dtype]
        torch.testing.assert_close(output.double(), step.oracle(i), atol=tolerance, rtol=tolerance)


@st.composite
def mixtures(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Decodes first, then chunks; a chunk may be of one token, or of none."""
    decodes = [(1, n) for n in draw(st.lists(st.integers(1, 60), max_size=4))]
    chunks = [
        (query_len, query_len + computed)
        for query_len, computed in draw(st.lists(st.tuples(st.integers(2, 20), st.integers(0, 40)), max_size=3))
    ]
    chunks += draw(st.sampled_from([[], [(1, 7)], [(0, 5)]])) if chunks else []
    return decodes + chunks or [(1, 1)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=mixtures(),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (1, 4), (3, 3), (4, 1)]),
    window=st.sampled_from([None, 1, 5, 33]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**16),
)
def test_any_mixture_of_decodes_and_chunks_attends_to_its_own_tokens_only(
    lengths, block_size, heads, window, sinks, dtype, seed
):
    kv_heads, group_size = heads
    assert_right(
        make_step(
            lengths,
            block_size=block_size,
            kv_heads=kv_heads,
            group_size=group_size,
            window=window,
            sinks=sinks,
            dtype=dtype,
            seed=seed,
        )
    )


@pytest.mark.parametrize("window", [None, 300])
def test_a_chunk_of_several_tiles_sees_every_token_before_it(window):
    query_len = 2 * TILE + 5
    assert_right(make_step([(1, 9), (query_len, query_len + 40)], kv_heads=1, window=window))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_are_capped_in_decodes_and_chunks(window, sinks):
    options = {"kv_heads": 1, "window": window, "softcap": 1.5, "scale": 2.0, "sinks": sinks}
    assert_right(make_step([(1, 9), (1, 400), (40, 340)], **options))


@pytest.mark.parametrize("window", [None, 600])
def test_decodes_of_very_different_lengths_are_each_right(window):
    lengths = [(1, n) for n in (1, 900, 655, 20, 901, 513, 300, 2)]
    assert_right(make_step(lengths, window=window, kv_heads=1))


def test_scale_multiplies_the_scores():
    assert_right(make_step([(1, 30), (7, 12)], scale=0.5))


def test_a_request_gets_the_same_result_alone_and_in_a_batch():
    step = make_step([(1, 31), (1, 200), (1, 77), (20, 90), (64, 64)], head_dim=64)
    for i, output in enumerate(step.run()):
        (alone,) = step.alone(i).run()
        torch.testing.assert_close(output, alone, atol=1e-6, rtol=0)


def test_a_layer_has_a_zeroed_cache_of_the_asked_size():
    attention = TorchAttention(Heads(4, 2, 8, 0.5), block_size=16)
    cache = attention.allocate_kv_cache(5, torch.bfloat16, torch.device("cpu"))
    assert cache.numel() == 5 * 16 * 2 * 2 * 8
    assert cache.dtype == torch.bfloat16
    assert not cache.any()


@given(st.lists(st.integers(1, 5000), max_size=64))
def test_grouping_covers_every_request_once_and_bounds_the_padding(lengths):
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        needed = sum(lengths[i] for i in group)
        padding = len(group) * max(lengths[i] for i in group) - needed
        assert padding <= max(FREE_PADDING, PADDING_SHARE * needed)


def test_requests_of_like_length_are_one_group():
    assert len(group_by_length([200] * 32)) == 1
    assert len(group_by_length(list(range(180, 212)))) == 1
