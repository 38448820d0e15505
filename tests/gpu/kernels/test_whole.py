"""Attention of whole prompts against its definition, in float64, one token and one head at a time."""

import random

import numpy as np
import pytest
import torch

from gpu.checkpoint.architecture import Heads
from gpu.kernels.whole import whole_attention, whole_prompts
from tests.gpu.kernels.test_attention import POISON, TOLERANCE
from tests.selection import slow_except


def oracle(qkv: torch.Tensor, heads: Heads, reach: int | None) -> torch.Tensor:
    """Return the attention of one prompt."""
    query, key, value = qkv.double().split((heads.query, heads.kv, heads.kv), 1)
    output = torch.zeros_like(query)
    for token in range(len(query)):
        seen = slice(0, len(query)) if reach is None else slice(max(0, token - reach), token + reach + 1)
        for head in range(heads.query):
            of_head = head // (heads.query // heads.kv)
            scores = key[seen, of_head] @ query[token, head] * heads.scale
            output[token, head] = scores.softmax(0) @ value[seen, of_head]
    return output


@pytest.mark.parametrize("seed", slow_except(range(12), 0, 1, 2))
def test_each_token_sees_the_tokens_of_its_own_prompt_on_both_sides(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, reach = rng.choice(list(TOLERANCE)), [None, rng.choice([1, 5, 16, 33, 64])][seed % 2]
    query, kv = rng.choice([(3, 3), (2, 2), (4, 1), (6, 2)])
    dim = rng.choice([16, 24, 32, 64])
    heads = Heads(query, kv, dim, rng.choice([dim**-0.5, 0.2]))
    lengths = [rng.choice([1, 2, 15, 16, 17, 31, 64, 65, 130, rng.randint(1, 90)]) for _ in range(rng.randint(1, 5))]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    # NaN behind the last token, which must not be read
    rows = torch.full((int(starts[-1]) + 40, query + 2 * kv, dim), POISON, dtype=dtype)
    qkv = rows[: starts[-1]].copy_(torch.randn(int(starts[-1]), query + 2 * kv, dim))
    output = whole_attention(qkv, heads, whole_prompts(starts, qkv, heads), reach)
    for found, given in zip(output.split(lengths), qkv.split(lengths), strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), oracle(given, heads, reach), atol=tolerance, rtol=tolerance)


def test_a_prompt_has_the_same_result_alone_and_among_others():
    torch.manual_seed(0)
    heads, starts = Heads(2, 2, 32, 0.2), np.array([0, 70, 75, 145], np.int32)
    qkv = torch.randn(145, 6, 32)
    together = whole_attention(qkv, heads, whole_prompts(starts, qkv, heads), 20)
    own = qkv[75:].clone()
    alone = whole_attention(own, heads, whole_prompts(np.array([0, 70], np.int32), own, heads), 20)
    torch.testing.assert_close(together[75:], alone, atol=1e-6, rtol=1e-6)
