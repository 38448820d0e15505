"""Norm, activation, gather, rotary embedding and the write to the cache, each against its formula in float64."""

import random
from typing import Any

import pytest
import torch

from gpu.checkpoint.architecture import Rope
from gpu.kernels import add_rms_norm, gather_rows, gelu_and_mul, rope_and_cache, silu_and_mul
from gpu.models.layers import Place, RotaryEmbedding
from tests.selection import slow_except

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted, atol=tolerance, rtol=tolerance)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 1100])
def test_norm_adds_first_and_normalizes_what_it_stored(size, dtype):
    residual, delta, weight = (torch.randn(*shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
    total = residual.double() + delta.double()
    output = add_rms_norm(residual, delta, weight, 1e-5)
    assert_near(residual, total)
    assert_near(output, rms_norm(residual.double(), weight.double(), 1e-5))


def test_norm_without_anything_to_add_leaves_the_residual():
    residual, weight = torch.randn(2, 96), torch.randn(96)
    before = residual.clone()
    assert_near(add_rms_norm(residual, None, weight, 1e-6), rms_norm(before.double(), weight.double(), 1e-6))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1536])
def test_silu_of_the_first_half_times_the_second(size, dtype):
    gate_up = (torch.randn(3, 2 * size) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(silu_and_mul(gate_up), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_the_first_half_times_the_second(dtype):
    gate_up = (torch.randn(3, 2 * 1536) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(gelu_and_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gathered_rows_are_copies_and_padding_is_zeros(index_dtype):
    source = torch.randn(7, 1300)
    indices = torch.tensor([6, -1, 0, 6], dtype=index_dtype)
    rows = gather_rows(source, indices)
    assert torch.equal(rows[[0, 2, 3]], source[[6, 0, 6]])
    assert not rows[1].any()
    rows.zero_()
    assert source.all()


def test_nothing_in_gives_nothing_out():
    empty = torch.empty(0, 64)
    assert add_rms_norm(empty, empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert silu_and_mul(empty).shape == (0, 32)
    assert gather_rows(torch.ones(3, 64), torch.empty(0, dtype=torch.int64)).shape == (0, 64)


@pytest.mark.parametrize("seed", slow_except(range(8), 0, 1))
def test_queries_are_rotated_in_place_and_keys_and_values_stored(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    head_dim = rng.choice([64, 80, 96, 128, 256])
    num_heads, num_kv_heads = rng.choice([(6, 2), (3, 3), (14, 2), (8, 1)])
    block_size, dtype = rng.choice([1, 8, 16]), rng.choice(DTYPES)
    eps, with_norm = 1e-6, seed % 2 == 0
    num_tokens, max_positions = 5, 40
    rotary = RotaryEmbedding(head_dim, max_positions, Rope(10000.0), Place(dtype, "cpu"))
    scales = 1.0 + torch.rand(max_positions) if seed % 3 == 0 else None
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    qk_norm = torch.randn(2, head_dim).to(dtype) if with_norm else None
    positions = torch.tensor(rng.sample(range(max_positions), num_tokens))
    slots = torch.tensor(rng.sample(range(4 * 16), num_tokens))
    slots[2] = -1  # a token of a graph's padding
    cache = torch.zeros(-(-64 // block_size), 2, num_kv_heads, block_size, head_dim, dtype=dtype)

    query, key, value = qkv.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        query, key = rms_norm(query, qk_norm[0].double(), eps), rms_norm(key, qk_norm[1].double(), eps)
    angles = rotary.table[:, positions].double()
    half = head_dim // 2
    cos, sin = angles[0, :, None, :half], angles[1, :, None, half:]
    query, key = (
        torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)
        for x in (query, key)
    )

    if scales is not None:
        query = query * scales[positions].double()[:, None, None]

    more: dict[str, Any] = {"qk_norm": qk_norm, "eps": eps, "query_scales": scales}
    rotated = rope_and_cache(qkv, positions, rotary.table, cache, slots, num_heads=num_heads, **more)
    assert rotated.data_ptr() == qkv.data_ptr()
    assert_near(rotated, query)
    stored = torch.zeros(cache.shape, dtype=torch.float64)
    for token in (0, 1, 3, 4):
        block, offset = divmod(int(slots[token]), block_size)
        stored[block, 0, :, offset] = key[token]
        stored[block, 1, :, offset] = value[token]
    assert_near(cache, stored)


@pytest.mark.usefixtures("right_e4m3")
def test_a_cache_of_8_bits_gets_the_nearest_numbers_and_the_largest_for_larger_ones():
    rotary = RotaryEmbedding(16, 8, Rope(10000.0), Place(torch.float32, "cpu"))
    qkv = torch.randn(2, 4, 16)
    qkv[0, 3, :3] = torch.tensor([500.0, -1e9, 127.9])
    qkv[1, 3, 5] = qkv[1, 3, 13] = torch.nan
    wanted = qkv.clone()
    cache = torch.zeros(2, 2, 1, 4, 16).to(torch.float8_e4m3fn)
    rope_and_cache(qkv, torch.zeros(2).long(), rotary.table, cache, torch.tensor([1, 4]), num_heads=2)
    for token, block, offset in ((0, 0, 1), (1, 1, 0)):  # at position 0 nothing is rotated
        stored, near = cache[block, :, 0, offset].float(), wanted[token, 2:].clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(stored.nan_to_num(), near.float().nan_to_num())
        assert stored.isnan().any() == (token == 1)
    assert cache[0, 1, 0, 1, :3].tolist() == [448.0, -448.0, 128.0]
