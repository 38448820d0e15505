"""A mixture of experts around its matrices, against loops in float64, and against itself in other company."""

from functools import partial

import numpy as np
import pytest
import torch

from gpu.kernels import clamped_swiglu, combine, group_rows, grouped_linear, route

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("normalized", [True, False])
def test_a_token_goes_to_its_likeliest_experts_by_their_shares(normalized):
    logits = torch.randn(9, 7).half()
    shares, experts = route(logits, 3, normalized)
    # Two halves may be equal: the lower expert comes first then.
    values, wanted = (each[:, :3] for each in logits.double().softmax(-1).sort(descending=True, stable=True))
    assert experts.tolist() == wanted.tolist()
    scale = values.sum(-1, keepdim=True) if normalized else 1.0
    torch.testing.assert_close(shares.double(), values / scale, atol=1e-6, rtol=1e-5)


def test_of_equal_scores_the_first_experts_are_chosen():
    shares, experts = route(torch.zeros(2, 64), 4, True)
    assert experts.tolist() == [[0, 1, 2, 3]] * 2
    assert shares.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "in_size", "out_size"),
    [(1, 1, 1, 64, 8), (5, 2, 4, 40, 72), (70, 2, 3, 130, 20), (3, 8, 128, 32, 16), (0, 2, 4, 8, 8)],
)
def test_each_row_meets_the_matrix_of_its_expert(tokens, top_k, experts, in_size, out_size, dtype):
    x, weight, bias = (
        torch.randn(*shape).to(dtype)
        for shape in ((tokens, in_size), (experts, out_size, in_size), (experts, out_size))
    )
    weight /= in_size**0.5
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k)
    groups = group_rows(chosen.long(), experts)
    wanted = torch.stack(
        [
            weight[expert].double() @ x[token].double() + bias[expert].double()
            for token in range(tokens)
            for expert in chosen[token]
        ]
        or [torch.zeros(out_size)]
    )[: tokens * top_k]
    near = partial(torch.testing.assert_close, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    scattered = grouped_linear(x, weight, bias, groups, gather=True, scatter=True)
    near(scattered.double(), wanted.double())
    grouped = grouped_linear(x[groups.order // top_k], weight, bias, groups)
    near(grouped.double(), wanted.double()[groups.order])


def test_a_row_is_the_same_bits_wherever_the_others_go(form, monkeypatch):
    # Triton's interpreter multiplies tiles by numpy, which on some processors (AVX2) adds up rows of one tile in
    # different orders. A GPU does not, nor does this product.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype=None: (a[:, :, None].astype(dtype) * b[None]).sum(1))
    near = partial(torch.allclose, atol=1e-4)
    same = near if form == "reference" else torch.equal  # the bits are what the kernel promises
    x, weight = torch.randn(90, 70), torch.randn(5, 24, 70)
    for seed in range(3):
        chosen = torch.randint(0, 5, (90, 1), generator=torch.Generator().manual_seed(seed))
        together = grouped_linear(x, weight, None, group_rows(chosen, 5), gather=True, scatter=True)
        for token in (0, 44, 89):
            alone = group_rows(chosen[token : token + 1], 5)
            assert same(grouped_linear(x[token : token + 1], weight, None, alone, gather=True)[0], together[token])


def test_a_row_that_is_not_finite_keeps_it_to_itself():
    x = torch.randn(40, 64)
    x[7] = torch.nan
    result = grouped_linear(x, torch.randn(2, 16, 64), None, group_rows(torch.zeros(40, 1).long(), 2), gather=True)
    assert result.isfinite().all(1).logical_not().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_experts_made_is_added_up_by_their_shares(dtype):
    pairs, shares = torch.randn(6 * 3, 1100).to(dtype), torch.rand(6, 3)
    wanted = (pairs.double().unflatten(0, (6, 3)) * shares.double().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(combine(pairs, shares).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert combine(pairs[:0], shares[:0]).shape == (0, 1100)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_clamped_gate(dtype):
    gate_up = torch.randn(5, 2 * 96).mul(4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    wanted = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    found = clamped_swiglu(gate_up, 1.702, 2.5)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    gate_up[1, 3] = gate_up[2, 100] = torch.nan
    assert clamped_swiglu(gate_up, 1.702, 2.5).isnan().nonzero().tolist() == [[1, 3], [2, 4]]


def test_what_the_ranks_make_of_their_experts_adds_up():
    x, weight = torch.randn(20, 64), torch.randn(7, 16, 64)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(20)])
    whole = grouped_linear(x, weight, None, group_rows(chosen, 7), gather=True, scatter=True)
    parts = [
        grouped_linear(x, weight[first:last], None, group_rows(chosen, last - first, first), gather=True, scatter=True)
        for first, last in ((0, 4), (4, 7))
    ]
    assert torch.equal(parts[0] + parts[1], whole)
    assert all(((part == 0).all(1) | (part == whole).all(1)).all() for part in parts)
