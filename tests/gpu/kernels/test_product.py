"""Products of few rows agree with float64, and a NaN weight spoils its own output only."""

from __future__ import annotations

import pytest
import torch

from gpu.kernels import product
from gpu.kernels.product import MOST_ROWS, linear


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "LEAST_BYTES", 0)


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"),
    [(1, 512, 40), (1, 1100, 17), (2, 1024, 40), (3, 1100, 17), (MOST_ROWS, 96, 64), (MOST_ROWS + 1, 96, 8), (0, 8, 8)],
)
def test_few_rows_times_a_matrix(form, rows, in_size, out_size, dtype):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, in_size), (out_size, in_size), (out_size,)))
    weight /= in_size**0.5
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0.0 if added is None else added.double())
        actual = linear(x, weight, added)
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 3])
def test_an_output_knows_no_weight_but_its_own(form, rows):
    x, weight = torch.randn(rows, 100).half(), torch.ones(20, 100).half()
    weight[3, 0] = float("nan")
    assert linear(x, weight).isfinite().all(0).logical_not().nonzero().tolist() == [[3]]
